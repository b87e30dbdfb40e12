"""kill -9 before each statement of closing, archiving, proving and dropping: the next run goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.archive import day as archive
from outbox_pipelines.partitions.calendar import leaf_of
from tests.conftest import clean_environment, wait_until
from tests.partitions import days
from tests.partitions.days import DAY
from tests.schema.servers import Connection, Database

NEVER = -1
_SESSIONS = b"""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""

_TABLES = """
SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'public' AND c.relkind = 'r' AND NOT c.relispartition AND c.relname <> %s"""
_PARTITION = """
SELECT to_jsonb(c) FROM pg_class c WHERE c.oid = to_regclass(%(leaf)s)
UNION ALL SELECT to_jsonb(i) FROM pg_inherits i WHERE inhrelid = to_regclass(%(leaf)s)
UNION ALL SELECT to_jsonb(o) FROM pg_constraint o WHERE conrelid = to_regclass(%(leaf)s)
UNION ALL SELECT to_jsonb(t) FROM pg_trigger t WHERE tgrelid = to_regclass(%(leaf)s)
UNION ALL SELECT to_jsonb(p) FROM pg_policy p WHERE polrelid = to_regclass(%(leaf)s)
UNION ALL SELECT to_jsonb(x) FROM pg_index x WHERE indrelid = to_regclass(%(leaf)s)"""
# What differs from one round to the next: times, identities, digests, numbers of events and transactions, and
# the ends of temporary names.
_VARYING = re.compile(
    r"\d{4}-\d\d-\d\d[T ][0-9:.+]+|[0-9a-f]{8}[0-9a-f-]*|\d{3,}|(?<=\d\d-)[a-z0-9_]{8}(?=/|$)"
)


class _Lives:
    """Processes that live a day's life, and die."""

    def __init__(self, observer: Connection, process: subprocess.Popen[str]) -> None:
        self._observer = observer
        self._process = process

    def live(self, directory: Path, statement: int) -> int:
        """The signal that ended one; 0 where it came to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{statement} {DAY} {directory}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL)
        # The server notices the crash in its own time.
        wait_until(lambda: self._observer.execute(_SESSIONS).fetchone() == (0,))
        return status


@pytest.fixture
def lives(database: Database) -> Iterator[_Lives]:
    with (
        database.connect() as observer,
        subprocess.Popen(
            [sys.executable, "-m", "tests.partitions.dying"],
            env=clean_environment() | {"OUTBOX_DSN": database.dsn},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        yield _Lives(observer, process)


def _rows_somewhere(database: Database, directory: Path) -> int:
    """Of the day: in the table, attached or not, or in a proven file."""
    if database.value("SELECT to_regclass(%s) IS NOT NULL", leaf_of(DAY)):
        return int(database.value(f"SELECT count(*) FROM {leaf_of(DAY)}"))
    found = archive.verify(days.archiving(database, directory), DAY)
    assert found.equal
    return found.rows


def _state(database: Database, directory: Path) -> list[Any]:
    """All that the next run can find: rows, the catalog's entries of the partition, and files."""
    leaf = leaf_of(DAY)
    with database.connect() as connection:
        found = {leaf: connection.execute(_PARTITION, {"leaf": leaf}).fetchall()}
        for (name,) in connection.execute(_TABLES, [leaf]).fetchall():
            found[name] = connection.execute(f'SELECT to_jsonb(t) FROM "{name}" t'.encode()).fetchall()
    rows = {
        name: sorted(_VARYING.sub("#", json.dumps(row)) for (row,) in each) for name, each in found.items()
    }
    files = [
        # A Parquet file is complete with its last four bytes.
        (
            _VARYING.sub("#", str(path.relative_to(directory))),
            len(content).bit_length(),
            content[-4:] == b"PAR1",
        )
        for path in sorted(directory.rglob("*"))
        for content in [path.read_bytes() if path.is_file() else b""]
    ]
    return [rows, files]


# What the statements do on an older server, other tests show.
@pytest.mark.parametrize("server", ["wheel"], indirect=True)
def test_every_statement(database: Database, lives: _Lives, tmp_path: Path) -> None:
    """Guards against a state from which no run continues, and against rows that are nowhere.

    A process is killed before each statement. Where nothing lasting happened since the death before (most
    statements only read), the next run would start from the same state again: it runs once for each state.
    """
    statement = states = 0
    before: list[Any] = []
    status: int = signal.SIGKILL
    while status:
        statement += 1
        # As if the day had never been.
        database.rows(f"DROP TABLE IF EXISTS {leaf_of(DAY)}")
        database.rows("DELETE FROM outbox_days WHERE day = %s", DAY)
        days.fill(database)
        days.relayed(database)
        directory = tmp_path / str(statement)
        status = lives.live(directory, statement)
        assert _rows_somewhere(database, directory) == 20
        now = _state(database, directory)
        if status and now == before:
            continue
        before = now
        states += 1
        assert lives.live(directory, NEVER) == 0, f"after a death before statement {statement}"
        assert days.state(database) == "dropped"
        assert _rows_somewhere(database, directory) == 20
        left = sorted(path.name for path in directory.rglob("*") if path.is_file())
        assert [name.split("-")[0] for name in left] == ["2026", "archive.json", "events"], statement
    assert statement > 40
    assert states > 10
