"""kill -9 before each statement and each change of the archive: nothing is lost or archived twice."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

from tests.cleaning.conftest import MONTHS, MONTHS_MAPPING, Cleaning, Make
from tests.conftest import clean_environment, wait_until

# A month that can be dropped, and one with a pending event, whose other rows are removed one by one.
_ROWS = """
INSERT INTO events (created_at, published_at, payload)
SELECT at + n * interval '1 day', CASE WHEN n < 5 OR at < '2026-02-01Z' THEN at + n * interval '1 day' END,
       jsonb_build_object('n', n, 'month', extract(month FROM at))
FROM generate_series(1, 5) n, unnest(ARRAY['2026-01-01Z', '2026-02-01Z']::timestamptz[]) at"""
_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""
_RUNS = 3


def _lives(cleaning: Cleaning, statement: int) -> bool:
    """Whether the run came to its end."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.cleaning.dying", str(statement)],
        env=clean_environment() | cleaning.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    # The server notices the crash in its own time.
    wait_until(lambda: cleaning.execute(_SESSIONS) == [(0,)], what="the sessions of the dead")
    return process.returncode == 0


def test_every_statement(make: Make, tmp_path: Path) -> None:
    """Guards against a state from which no run continues, a row without a file, and a row in two files."""
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    cleaning.execute(_ROWS)
    deaths = 0
    # Each run dies a little later than the one before, and leaves its state to the next one.
    for statement in itertools.count(8):
        if _lives(cleaning, statement):
            break
        deaths += 1
        unpublished = "SELECT count(*) FROM events WHERE published_at IS NULL"
        assert cleaning.execute(unpublished) == [(1,)]
    assert deaths > 5
    assert _lives(cleaning, 0)
    assert cleaning.execute("SELECT count(*) FROM events") == [(1,)]
    found = cleaning.archived("(payload::json ->> 'month')::int, (payload::json ->> 'n')::int, id")
    assert len({row[2] for row in found}) == len(found) == 9


def test_each_statement_of_a_first_run(make: Make, tmp_path: Path) -> None:
    """Guards the same for runs that die at a statement which a continued run does not reach."""
    cleaning = make(MONTHS, MONTHS_MAPPING, archive=str(tmp_path / "archive"))
    expected = 0
    for statement in itertools.count(10, _RUNS):
        cleaning.execute(
            "CREATE TABLE IF NOT EXISTS events_01 PARTITION OF events "
            "FOR VALUES FROM ('2026-01-01Z') TO ('2026-02-01Z')"
        )
        cleaning.execute(_ROWS)
        expected += 9
        is_alive = _lives(cleaning, statement)
        assert _lives(cleaning, 0)
        found = cleaning.archived("id")
        assert len(set(found)) == len(found) == expected
        if is_alive:
            break
