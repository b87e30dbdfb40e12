"""Dagster relays and watches an existing table (OUTBOX_TABLE) as it does the outbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
import pytest

from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.relay.relay_session import Session
from outbox_pipelines.defs.relay.supervision import owner_of
from outbox_pipelines.quality.rules import OF_CONNECTOR, OF_TABLES
from tests.conftest import wait_until
from tests.defs.conftest import run, schedule_of, serving
from tests.defs.test_health import _tick as health_tick
from tests.defs.test_supervisor import evaluate
from tests.existing.conftest import Make, make_table, table
from tests.existing.textbook import Table

__all__ = ["Make", "make_table", "table"]


@pytest.fixture
def served(table: Table, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("OUTBOX_TABLE", json.dumps(table.settings.table))
    return serving(
        dsn=table.settings.dsn, kafka=table.settings.kafka, topic=table.settings.topic, session_seconds=600
    )


@contextmanager
def _session(table: Table, run_id: str, seconds: float) -> Iterator[Session]:
    with Session(
        table.settings,
        shard=0,
        owner=owner_of(run_id, "here"),
        until_empty=False,
        hand_over_after=seconds,
    ) as session:
        yield session


def test_a_run_publishes(
    instance: dg.DagsterInstance,
    table: Table,
    served: Served,
) -> None:
    seqs = table.write(("a", {"n": 1}), ("b", {"n": 2}))
    result, _ = run("relay_once", instance, served)
    assert result.success
    assert not table.pending()
    assert len(table.messages()) == len(seqs)


def test_sessions_hand_over(table: Table) -> None:
    """Guards against a gap between two sessions, and against two at the same time."""
    table.write(("a", {"n": 1}))
    with _session(table, "1111111122", 0.1) as first:
        wait_until(lambda: not table.pending(), what="the first session")
        with _session(table, "3333333344", 600) as second:
            wait_until(lambda: first.wait(0) and second.progress() is not None, what="the hand-over")
            table.write(("a", {"n": 2}))
            wait_until(lambda: not table.pending(), what="the second session")
    assert first.result() is not None
    assert table.numbers("a") == [1, 2]


def test_the_supervisor_keeps_it_relayed(
    instance: dg.DagsterInstance,
    table: Table,
    served: Served,
) -> None:
    (request,) = evaluate(instance, served).run_requests or []
    assert request.run_config == {"ops": {"relay_shard": {"config": {"shard": 0}}}}
    with _session(table, "1111111122", 600) as session:
        wait_until(lambda: session.progress() is not None, what="the session")
        result = evaluate(instance, served)
        assert not result.run_requests
        assert "shard 0 has been relayed by dagster run 11111111 on here for" in str(result.skip_reason)
    with table.relayed():
        result = evaluate(instance, served)
        assert not result.run_requests
        assert "which Dagster did not start" in str(result.skip_reason)


def test_its_checks(
    instance: dg.DagsterInstance,
    table: Table,
    served: Served,
) -> None:
    """Guards against a dead letter that no check shows, and against checks of days that it has not."""
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, retry_count, last_error) "
            "VALUES ('order', 'a', 'e', '{}', 5, 'outbox: dead letter: too large')"
        )
        connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, created_at) "
            "VALUES ('order', 'b', 'e', '{}', now() - interval '1 hour')"
        )
    found, (observation,), _ = health_tick(instance, served)
    assert set(found) == OF_TABLES - OF_CONNECTOR | {"database"}
    assert {name for name, check in found.items() if not check.passed} == {
        "lag",
        "dead_letters",
        "shards_relayed",
    }
    assert found["dead_letters"].description == "1 dead letters (1 × too large)"
    assert observation.metadata["unpublished"].value == 1


def test_the_command_fails_as_the_checks_do(table: Table) -> None:
    status = table.outbox.process("status", "--check", **table.environment)
    assert status.returncode == 0, status.stderr
    assert "checks        all passed" in status.stdout
    with table.connect() as connection:
        connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload, retry_count, last_error) "
            "VALUES ('order', 'a', 'e', '{}', 5, 'outbox: dead letter: too large')"
        )
    status = table.outbox.process("status", "--check", **table.environment)
    assert status.returncode == 1
    assert "ERROR         dead_letters: 1 dead letters (1 × too large)" in status.stdout
    quiet = table.outbox.process("status", "--check", **table.environment, OUTBOX_ERROR_AT="dead_letters=2")
    assert quiet.returncode == 0


@pytest.mark.parametrize("schedule", ["archive_days", "drop_days", "maintain_partitions"])
def test_schedules_of_days_skip(served: Served, schedule: str) -> None:
    """Guards against a run that fails every hour."""
    with dg.build_schedule_context() as context:
        skipped = schedule_of(served, schedule)(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "has no days" in str(skipped.skip_message)
