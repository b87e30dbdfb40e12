"""kill -9 before each statement of closing, archiving, proving and dropping: the next run goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.partitions.calendar import leaf_of
from tests import forks
from tests.conftest import clean_environment, wait_until
from tests.days.partitions import days
from tests.days.partitions.days import DAY
from tests.days.partitions.dying import STOPPED, STOPPING
from tests.schema.servers import Connection, Database

NEVER = -1
_SESSIONS = b"""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
AND application_name <> 'tests'"""

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


class _Lives:
    """Processes that live a day's life, and die."""

    def __init__(self, observer: Connection, process: subprocess.Popen[str]) -> None:
        self._observer = observer
        self._process = process

    def live(self, directory: Path, statement: int) -> int:
        """The signal that ended one; 0 where it came to its end."""
        self._say(f"{statement} {DAY} {directory}")
        return self._ended(self._answer())

    def stops(self, directory: Path) -> Iterator[None]:
        """Live to the end, and stop before each statement."""
        self._say(f"{STOPPING} {DAY} {directory}")
        while (answer := self._answer()) == STOPPED:
            yield
            self._say("")
        assert self._ended(answer) == 0

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip()

    def _ended(self, answer: str) -> int:
        status = int(answer)
        assert status in (0, signal.SIGKILL)
        # The server notices the crash in its own time.
        wait_until(lambda: self._observer.execute(_SESSIONS).fetchone() == (0,))
        return status


@pytest.fixture
def lives(database: Database) -> Iterator[_Lives]:
    with (
        database.connect() as observer,
        forks.Popen(
            [sys.executable, "-m", "tests.days.partitions.dying"],
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


def _begin(database: Database) -> None:
    """As if the day had never been."""
    database.rows(f"DROP TABLE IF EXISTS {leaf_of(DAY)}")
    database.rows("DELETE FROM outbox_days WHERE day = %s", DAY)
    days.fill(database)
    days.relayed(database)


def _rows(database: Database) -> dict[str, list[str]] | None:
    """Rows, and the catalog's entries of the partition; None where a transaction locks a table."""
    leaf = leaf_of(DAY)
    with database.connect() as connection:
        connection.execute("SET lock_timeout = '100ms'")
        try:
            found = {leaf: connection.execute(_PARTITION, {"leaf": leaf}).fetchall()}
            for (name,) in connection.execute(_TABLES, [leaf]).fetchall():
                found[name] = connection.execute(f'SELECT to_jsonb(t) FROM "{name}" t'.encode()).fetchall()
        except psycopg.errors.LockNotAvailable:
            return None
    return {name: sorted(json.dumps(row) for (row,) in each) for name, each in found.items()}


def _files(directory: Path) -> list[tuple[Path, int]]:
    """Files and folders, and their sizes."""
    return sorted((path, path.stat().st_size) for path in directory.rglob("*"))


# What the statements do on an older server, other tests show.
@pytest.mark.parametrize("server", ["wheel"], indirect=True)
def test_every_statement(database: Database, lives: _Lives, tmp_path: Path, is_short: bool) -> None:
    """Guards against a state from which no run continues, and against rows that are nowhere.

    Most statements only read. Where nothing lasting has happened since the statement before, a death leaves
    the state that a death before that one leaves: a process is killed once for each state.
    """
    first = tmp_path / "stopping"
    _begin(database)
    statement = 0
    changing: list[int] = []
    before: tuple[Any, Any] = None, None
    for _ in lives.stops(first):
        statement += 1
        if is_short and len(changing) == 6:
            continue
        # Nothing that is locked has been committed.
        now = _rows(database) or before[0], _files(first)
        if now != before:
            changing.append(statement)
            before = now
    assert statement > 40
    assert len(changing) > (5 if is_short else 10)
    for statement in changing[5:] if is_short else changing:
        _begin(database)
        directory = tmp_path / str(statement)
        assert lives.live(directory, statement) == signal.SIGKILL
        assert _rows_somewhere(database, directory) == 20
        assert lives.live(directory, NEVER) == 0, f"after a death before statement {statement}"
        assert days.state(database) == "dropped"
        assert _rows_somewhere(database, directory) == 20
        left = sorted(path.name for path in directory.rglob("*") if path.is_file())
        assert [name.split("-")[0] for name in left] == ["2026", "archive.json", "events"], statement
