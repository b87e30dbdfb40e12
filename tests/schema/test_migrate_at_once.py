"""Migrations that meet each other or die on the way."""

from __future__ import annotations

import subprocess

import pytest

from outbox_pipelines.database import schema
from tests import forks
from tests.conftest import clean_environment, command, wait_until
from tests.schema.servers import Database

BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = %s"
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox migrate'"


def start_migrate(database: Database) -> subprocess.Popen[str]:
    return forks.Popen(
        command("migrate"),
        env=clean_environment() | {"OUTBOX_DSN": database.dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_at_once_both_succeed_and_one_applies(empty: Database) -> None:
    """Guards against two replicas of a deployment that race until one fails with a duplicate table."""
    with empty.connect(autocommit=False) as gate:
        # Both are stopped by a lock, so that they really meet.
        gate.execute("SELECT pg_advisory_xact_lock(hashtext('outbox migrate'))")
        both = [start_migrate(empty) for _ in range(2)]
        wait_until(lambda: empty.value(BLOCKED, "outbox migrate") == 2, what="two waiting migrations")
    outputs = sorted(process.communicate(timeout=600)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0].startswith("applied 0001_outbox, ")
    assert outputs[1] == "nothing to do\n"


def test_a_killed_migrate_leaves_nothing(empty: Database) -> None:
    """Guards against half a schema after kill -9, on which the next migrate fails."""
    with empty.connect(autocommit=False) as gate:
        # An uncommitted table of the same name stops the migration in its second file.
        gate.execute("CREATE TABLE outbox_days ()")
        process = start_migrate(empty)
        wait_until(lambda: empty.value(BLOCKED, "outbox migrate") == 1, what="a migration half way")
        process.kill()
        process.communicate()
        gate.rollback()
    wait_until(lambda: empty.value(SESSIONS) == 0, what="the end of its session")
    assert empty.catalog() == []
    assert schema.migrate(empty.settings)[0] == "0001_outbox"


def test_an_exception_half_way_leaves_nothing(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file that fails after others were applied and committed on their own."""

    def stop(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "_differences", stop)
    with pytest.raises(KeyboardInterrupt):
        schema.migrate(empty.settings)
    assert empty.catalog() == []
