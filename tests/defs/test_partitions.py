"""The job `maintain_partitions` and its check: days ahead, kept by Dagster."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.definitions import defs
from outbox_pipelines.defs import first_day as module
from outbox_pipelines.defs.first_day import first_day
from outbox_pipelines.defs.partitions import maintain_partitions
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import requests
from tests.archive.days import days_ago, make_days, publish, write
from tests.conftest import Outbox, clean_environment
from tests.defs.conftest import failure_of, records_of, resource_of
from tests.partitions.test_partitions import DAYS_GO_BY
from tests.schema.servers import Database


def _output(result: dg.ExecuteInProcessResult, step: str) -> dict[str, Any]:
    """The metadata of what a step has put out."""
    (output,) = [
        event
        for event in result.all_events
        if event.event_type is dg.DagsterEventType.STEP_OUTPUT and event.step_key == step
    ]
    return dict(output.step_output_data.metadata)


def _reasons(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """Of the steps that failed."""
    return {
        str(event.step_key): failure_of(event)
        for event in result.all_events
        if event.event_type is dg.DagsterEventType.STEP_FAILURE
    }


def test_days_begin_with_the_outbox(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against months of days on the pages that the outbox never had, and against none where the
    database does not answer when the definitions load."""
    monkeypatch.delenv("OUTBOX_SETTINGS_FILE", raising=False)
    monkeypatch.setenv("OUTBOX_DSN", database.dsn)
    monkeypatch.setattr(module, "_given", None)
    [(begun,)] = database.rows("SELECT min(day) FROM outbox_days")
    assert first_day() == begun
    database.rows("DROP TABLE outbox_days CASCADE")
    assert first_day() == datetime.now(UTC).date()
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    assert first_day() == date(2026, 1, 1)


def test_days_begin_with_the_outbox_that_is_given(database: Database) -> None:
    """Guards against days since 2026-01-01 where the settings are in the definitions alone."""
    [(begun,)] = database.rows("SELECT min(day) FROM outbox_days")
    script = (
        "import dagster as dg; from outbox_pipelines.defs import outbox_definitions as of;"
        "from outbox_pipelines.defs.resources import OutboxResource;"
        "found = of(resource=OutboxResource(dsn=dg.EnvVar('SHOP_DSN')));"
        "[spec] = [s for s in found.resolve_all_asset_specs() if s.key.path[-1] == 'archive'];"
        "print(spec.partitions_def.start.date()); of(resource=OutboxResource(dsn='dbname=other'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment() | {"SHOP_DSN": database.dsn},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(begun)], done.stderr
    # Modules are imported once in a process.
    assert "once per process" in done.stderr


def test_a_day_that_is_not_known_stops_no_other(instance: dg.DagsterInstance) -> None:
    """Guards against a schedule that fails for a day that was filled after the definitions were loaded."""
    known, unknown = days_ago(2), date(2025, 12, 24)
    with dg.build_schedule_context(instance, datetime.now(UTC)) as context:
        found = requests(context, [unknown, known], nothing="")
        assert [each.partition_key for each in found] == [str(known)]  # type: ignore[union-attr]
        skipped = requests(context, [unknown], nothing="")
    assert "reload this code location" in str(skipped.skip_message)  # type: ignore[union-attr]


def test_the_job_makes_days(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against an insert that fails because a partition is missing."""
    with outbox.connect() as connection:
        connection.execute(DAYS_GO_BY.format(days=10).encode())
    resources = {"outbox_pipelines": resource_of(outbox)}
    result = maintain_partitions.execute_in_process(instance=instance, resources=resources)
    metadata = _output(result, "make_partitions")
    assert (metadata["made"].value, metadata["days_ahead"].value) == (10, 14)


def test_the_days_are_shown(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against an operator who needs a shell to see which days there are."""
    resources = {"outbox_pipelines": resource_of(outbox)}
    result = maintain_partitions.execute_in_process(instance=instance, resources=resources)
    (observation,) = result.asset_observations_for_node("show_days")
    days: list[Any] = [record.data for record in records_of(observation.metadata["days"])]
    assert len(days) == observation.metadata["attached_days"].value == 16
    assert days[0]["day"] > days[-1]["day"]
    assert days[0]["state"] == "open"


def test_a_failure_says_what_to_correct(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a run whose error is a stack trace."""
    resources = {"outbox_pipelines": resource_of(outbox, db_schema="elsewhere")}
    result = maintain_partitions.execute_in_process(
        instance=instance, resources=resources, raise_on_error=False
    )
    reasons = _reasons(result)
    assert set(reasons) == {"make_partitions", "close_days", "purge_rows", "show_days"}
    for reason in reasons.values():
        assert "run `outbox migrate`" in reason
        assert len(reason.splitlines()) == 1


def test_the_job_closes_days_and_says_why_others_stay_open(
    database: Database, instance: dg.DagsterInstance
) -> None:
    """Guards against days that are never closed, a run that fails for one of them, and unreported reasons."""
    published, unpublished = days_ago(4), days_ago(3)
    make_days(database, published)
    write(database, published)
    publish(database)
    write(database, unpublished)
    resources = {"outbox_pipelines": OutboxResource(dsn=database.dsn)}
    result = maintain_partitions.execute_in_process(instance=instance, resources=resources)
    assert result.success
    metadata = _output(result, "close_days")
    assert metadata["closed"].value[0] == str(published)
    (why_not,) = metadata["stay_open"].value.values()
    assert metadata["stay_open"].value == {str(unpublished): why_not}
    assert why_not.startswith("shard 0 has not published 1 of its events")
    logged = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert f"{unpublished} stays open: {why_not}" in logged
    assert database.value("SELECT state FROM outbox_days WHERE day = %s", published) == "closed"


def test_days_are_made_where_none_can_be_closed(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against writers that stand still because an old day could not be closed."""
    with outbox.connect() as connection:
        connection.execute(DAYS_GO_BY.format(days=10).encode())
        # As after a database that was restored half.
        connection.execute("INSERT INTO outbox_days (day) VALUES ('2026-01-01')")
    resources = {"outbox_pipelines": resource_of(outbox)}
    result = maintain_partitions.execute_in_process(instance=instance, resources=resources)
    assert _output(result, "make_partitions")["made"].value == 10
    assert "does not exist" in _output(result, "close_days")["stay_open"].value["2026-01-01"]


def test_it_runs_automatically() -> None:
    """Guards against a schedule that a user must find and switch on."""
    schedule = defs.resolve_schedule_def("maintain_partitions")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert schedule.job_name == "maintain_partitions"
