"""kill -9 before each statement of closing, archiving, proving and dropping: the next run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.archive import day as archive
from outbox_pipelines.partitions.calendar import leaf_of
from tests.conftest import clean_environment, wait_until
from tests.partitions import days
from tests.partitions.days import DAY
from tests.schema.servers import Database

NEVER = -1
_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""


class _Lives:
    """Processes that live a day's life, and die."""

    def __init__(self, database: Database, process: subprocess.Popen[str]) -> None:
        self._database = database
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
        wait_until(lambda: not self._database.value(_SESSIONS))
        return status


@pytest.fixture
def lives(database: Database) -> Iterator[_Lives]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.partitions.dying"],
        env=clean_environment() | {"OUTBOX_DSN": database.dsn},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield _Lives(database, process)


def _rows_somewhere(database: Database, directory: Path) -> int:
    """Of the day: in the table, attached or not, or in a proven file."""
    if database.value("SELECT to_regclass(%s) IS NOT NULL", leaf_of(DAY)):
        return int(database.value(f"SELECT count(*) FROM {leaf_of(DAY)}"))
    found = archive.verify(days.archiving(database, directory), DAY)
    assert found.equal
    return found.rows


# Half a minute; what the statements do on an older server, other tests show.
@pytest.mark.parametrize("server", ["wheel"], indirect=True)
def test_every_statement(database: Database, lives: _Lives, tmp_path: Path) -> None:
    """Guards against a state from which no run continues, and against rows that are nowhere."""
    statement = 0
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
        assert lives.live(directory, NEVER) == 0, f"after a death before statement {statement}"
        assert days.state(database) == "dropped"
        assert _rows_somewhere(database, directory) == 20
        left = sorted(path.name for path in directory.rglob("*") if path.is_file())
        assert [name.split("-")[0] for name in left] == ["2026", "archive.json", "events"], statement
    assert statement > 40
