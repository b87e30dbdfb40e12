"""Dagster relays and watches an existing table (OUTBOX_TABLE) as it does the outbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest

from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.build import served as served_of_file
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.relay.assets import config
from outbox_pipelines.defs.relay.relay_session import RelaySession
from outbox_pipelines.defs.relay.supervision import owner_of
from outbox_pipelines.quality.rules import OF_CONNECTOR, OF_TABLES
from tests.conftest import wait_until
from tests.defs.conftest import failure_of, run, schedule_of, serving
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
def _session(table: Table, run_id: str, seconds: float) -> Iterator[RelaySession]:
    with RelaySession(
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
    assert found["dead_letters"].description == "1 dead letter (1 × too large)"
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
    assert "ERROR         dead_letters: 1 dead letter (1 × too large)" in status.stdout
    quiet = table.outbox.process("status", "--check", **table.environment, OUTBOX_ERROR_AT="dead_letters=2")
    assert quiet.returncode == 0


def test_what_is_shown_can_run(
    instance: dg.DagsterInstance,
    table: Table,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Guards against a job, a check or an asset of days, which an existing table refuses when it is used."""
    for name, value in (
        *(
            ("CATALOG_FILE", "catalog.yaml"),
            ("ARCHIVE", str(tmp_path / "archive")),
            ("CLEAN_AFTER_HOURS", "1"),
        ),
        *(("MONTHS_AHEAD", "1"), ("DRAIN_CONSUMERS", "shop:consumer")),
    ):
        monkeypatch.setenv(f"OUTBOX_{name}", value)
    definitions = outbox_definitions(served)
    repository = definitions.get_repository_def()
    asked = {
        "drain_inbox": {"ops": {"drain": {"config": {"consumer": "shop:consumer"}}}},
        # It would wait for a successor.
        "relay_session": config(until_empty=True),
    }
    refused = {}
    for name in (name for name in repository.job_names if not name.startswith("__")):
        result = repository.get_job(name).execute_in_process(
            instance=instance, raise_on_error=False, run_config=asked.get(name)
        )
        if not result.success:
            refused[name] = failure_of(result.get_step_failure_events()[0])
    # It has no months, there is no such consumer, and no daemon launched the run: reasons of other kinds.
    assert refused.keys() == {"make_months", "drain_inbox", "purge_history"}
    assert "append-only" not in "".join(refused.values())
    graph = repository.asset_graph
    assert {key.path[-1] for key in graph.get_all_asset_keys()} == {
        *("tables", "events", "relay", "health", "inbox"),
    }
    assert {key.name for key in graph.asset_check_keys} == OF_TABLES - OF_CONNECTOR | {"database", "handled"}
    assert not any(graph.get(key).is_partitioned for key in graph.get_all_asset_keys())
    assert {each.name for each in definitions.schedules or ()} == {
        "clean_table",
        "make_months",
        "purge_history",
    }
    assert {each.name for each in definitions.sensors or ()} == {
        *("relay_supervisor", "health", "inbox", "alerts"),
    }


def test_one_of_several_in_a_file(table: Table, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against the parts of one kind for an outbox of the other kind beside it."""
    monkeypatch.chdir(tmp_path)
    Path("outbox.toml").write_text(
        f'[days]\nclean_after_hours = 1\n[outboxes.old]\ndsn = "{table.settings.dsn.reveal()}"\n'
        '[outboxes.old.table]\nname = "events"\n[outboxes.old.table.columns]\npublished_at = "published_at"\n'
        '[outboxes.new]\ndsn = "host=127.0.0.1 port=1"\n'
    )
    # Of none of the outboxes of a file.
    monkeypatch.setenv("OUTBOX_TABLE", "name=other,slot=s")
    repository = outbox_definitions(*served_of_file()).get_repository_def()
    names = {name for name in repository.job_names if not name.startswith("__")}
    assert {"outbox_old_clean_table", "outbox_new_archive_day", "outbox_new_cutover"} <= names
    assert not {"outbox_new_clean_table", "outbox_old_archive_day", "outbox_old_cutover"} & names
    keys = {key.to_user_string() for key in repository.asset_graph.get_all_asset_keys()}
    assert {"outbox/new/archive", "outbox/new/events", "outbox/old/events", "outbox/old/relay"} <= keys
    assert "outbox/old/archive" not in keys


@pytest.mark.parametrize("schedule", ["archive_days", "drop_days", "maintain_partitions"])
def test_schedules_of_days_skip(served: Served, schedule: str) -> None:
    """Guards against a run that fails every hour."""
    with dg.build_schedule_context() as context:
        skipped = schedule_of(served, schedule)(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "has no days" in str(skipped.skip_message)
