"""kill -9 before each statement and each change of the archive: nothing is lost or archived twice."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import clean_environment, wait_until
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING, Cleaning, Make

# A month that can be dropped, and one with a pending event, whose other rows are removed one by one.
_ROWS = """
INSERT INTO events (created_at, published_at, payload)
SELECT at + n * interval '1 day', CASE WHEN n < 5 OR at < '2026-02-01Z' THEN at + n * interval '1 day' END,
       jsonb_build_object('n', n, 'month', extract(month FROM at))
FROM generate_series(1, 5) n, unnest(ARRAY['2026-01-01Z', '2026-02-01Z']::timestamptz[]) at"""
_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
AND application_name <> 'tests'"""


class Lives:
    """Clean-ups that die, each in a process of its own."""

    def __init__(self, cleaning: Cleaning, process: subprocess.Popen[str]) -> None:
        self.cleaning, self._process = cleaning, process

    def run(self, statement: int) -> bool:
        """Whether it came to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{statement}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL), (statement, status)
        # The server notices the crash in its own time.
        wait_until(lambda: self.cleaning.execute(_SESSIONS) == [(0,)], what="the sessions of the dead")
        return status == 0


@pytest.fixture
def lives(make: Make, tmp_path: Path) -> Iterator[Lives]:
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    with forks.Popen(
        [sys.executable, "-m", "tests.existing.cleaning.dying"],
        env=clean_environment() | cleaning.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Lives(cleaning, process)


def test_every_statement(lives: Lives, is_short: bool) -> None:
    """Guards against a state from which no run continues, a row without a file, and a row in two files."""
    cleaning = lives.cleaning
    cleaning.execute(_ROWS)
    deaths = 0
    # Each run dies a little later than the one before, and leaves its state to the next one.
    for statement in itertools.count(8, 5 if is_short else 1):
        if lives.run(statement):
            break
        deaths += 1
        unpublished = "SELECT count(*) FROM events WHERE published_at IS NULL"
        assert cleaning.execute(unpublished) == [(1,)]
    assert deaths > (0 if is_short else 5)
    assert lives.run(0)
    assert cleaning.execute("SELECT count(*) FROM events") == [(1,)]
    found = cleaning.archived("(payload::json ->> 'month')::int, (payload::json ->> 'n')::int, id")
    assert len({row[2] for row in found}) == len(found) == 9


@pytest.mark.extended
@pytest.mark.thorough
def test_each_statement_of_a_first_run(lives: Lives, stride: int) -> None:
    """Guards the same for runs that die at a statement which a continued run does not reach."""
    cleaning = lives.cleaning
    expected = 0
    for statement in itertools.count(10, 3 * stride):
        cleaning.execute(
            "CREATE TABLE IF NOT EXISTS events_01 PARTITION OF events "
            "FOR VALUES FROM ('2026-01-01Z') TO ('2026-02-01Z')"
        )
        cleaning.execute(_ROWS)
        expected += 9
        is_alive = lives.run(statement)
        assert lives.run(0)
        found = cleaning.archived("id")
        assert len(set(found)) == len(found) == expected
        if is_alive:
            break
