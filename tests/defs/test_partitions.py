"""The job `maintain_partitions` and its check: days ahead, kept by Dagster."""

from __future__ import annotations

import socket
import time
from datetime import UTC, date, datetime
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import first_day as module
from outbox_pipelines.defs.first_day import first_day
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.runs import requests
from tests.conftest import Outbox, patience
from tests.days.archive.days import days_ago, make_days, publish, write
from tests.days.partitions.test_partitions import DAYS_GO_BY
from tests.defs.conftest import failure_of, job_of, records_of, schedule_of, served_of, serving
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


def test_days_begin_with_each_outbox(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against months of days on the pages that the outbox never had, and against none where the
    database does not answer when the definitions load."""
    [(begun,)] = database.rows("SELECT min(day) FROM outbox_days")
    monkeypatch.setenv("SHOP_DSN", database.dsn)
    assert first_day(Served(name="shop", dsn_variable="SHOP_DSN")) == begun
    given = Served(name="shop", dsn_variable="SHOP_DSN", partition_start=date(2026, 2, 3))
    assert (given.days.start.date(), serving(dsn=database.dsn).days.start.date()) == (date(2026, 2, 3), begun)
    database.rows("DROP TABLE outbox_days CASCADE")
    assert first_day(serving(dsn=database.dsn)) == datetime.now(UTC).date()


def test_a_database_that_does_not_answer_costs_the_load_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a code location that does not load because packets are dropped."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(module, "_silent", set())
    assert first_day(serving(dsn="postgresql://nobody@127.0.0.1:1/nowhere")) == date(2026, 1, 1)
    assert "outbox outbox: first day unknown, days start at 2026-01-01: cannot connect" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as mute:
        dsn = f"postgresql://nobody@127.0.0.1:{mute.getsockname()[1]}/nowhere"
        began = time.monotonic()
        assert first_day(serving(dsn=dsn)) == first_day(serving(dsn=dsn)) == date(2026, 1, 1)
        assert time.monotonic() - began < patience(5)
        mute.settimeout(0)
        mute.accept()[0].close()
        with pytest.raises(BlockingIOError):
            mute.accept()
    assert len(module._silent) == 1


def test_a_day_that_is_not_known_stops_no_other(instance: dg.DagsterInstance) -> None:
    """Guards against a schedule that fails for a day that was filled after the definitions were loaded."""
    known, unknown = days_ago(2), date(2025, 12, 24)
    with dg.build_schedule_context(instance, datetime.now(UTC)) as context:
        found = requests(context, serving(), [unknown, known], nothing="")
        assert [each.partition_key for each in found] == [str(known)]  # type: ignore[union-attr]
        skipped = requests(context, serving(), [unknown], nothing="")
    assert "reload this code location" in str(skipped.skip_message)  # type: ignore[union-attr]


def test_the_job_makes_days(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against an insert that fails because a partition is missing."""
    with outbox.connect() as connection:
        connection.execute(DAYS_GO_BY.format(days=10).encode())
    job = job_of(served_of(outbox), "maintain_partitions")
    result = job.execute_in_process(instance=instance)
    metadata = _output(result, "make_partitions")
    assert (metadata["made"].value, metadata["partitions_ahead"].value) == (10, 14)


def test_the_days_are_shown(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against an operator who needs a shell to see which days there are."""
    job = job_of(served_of(outbox), "maintain_partitions")
    result = job.execute_in_process(instance=instance)
    (observation,) = result.asset_observations_for_node("show_days")
    days: list[Any] = [record.data for record in records_of(observation.metadata["days"])]
    assert len(days) == observation.metadata["attached_days"].value == 16
    assert days[0]["day"] > days[-1]["day"]
    assert days[0]["state"] == "open"


def test_a_failure_says_what_to_correct(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a run whose error is a stack trace."""
    job = job_of(served_of(outbox, db_schema="elsewhere"), "maintain_partitions")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
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
    job = job_of(serving(dsn=database.dsn), "maintain_partitions")
    result = job.execute_in_process(instance=instance)
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
    job = job_of(served_of(outbox), "maintain_partitions")
    result = job.execute_in_process(instance=instance)
    assert _output(result, "make_partitions")["made"].value == 10
    assert "does not exist" in _output(result, "close_days")["stay_open"].value["2026-01-01"]


def test_it_runs_automatically() -> None:
    """Guards against a schedule that a user must find and switch on."""
    schedule = schedule_of(serving(), "maintain_partitions")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert schedule.job_name == "maintain_partitions"
