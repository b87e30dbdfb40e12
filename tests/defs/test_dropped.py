"""The asset `outbox/dropped`, its job and its schedule."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import cast

import dagster as dg
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.defs.outbox import Outbox as Served
from tests.days.archive.days import days_ago, make_days, publish, write_shapes
from tests.defs.conftest import failure_of, job_of, metadata_of, schedule_of, serving
from tests.schema.servers import Database

DAY = days_ago(4)


@pytest.fixture
def served(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Of an outbox with an archived day that is past its retention."""
    monkeypatch.setenv("OUTBOX_RETENTION_DAYS", "2")
    make_days(database, DAY)
    write_shapes(database, DAY)
    publish(database)
    served = serving(dsn=database.dsn, archive=str(tmp_path / "archive"))
    days.archive(served.load_settings(), DAY)
    return served


def _run(
    instance: dg.DagsterInstance, served: Served, day: date = DAY, **config: bool
) -> dg.ExecuteInProcessResult:
    return job_of(served, "drop_day").execute_in_process(
        instance=instance,
        partition_key=str(day),
        run_config={"ops": {"drop": {"config": config}}},
        raise_on_error=False,
    )


def _reason(result: dg.ExecuteInProcessResult) -> str:
    (failed,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_FAILURE]
    return failure_of(failed)


def _is_there(database: Database) -> bool:
    return bool(database.value("SELECT to_regclass(%s) IS NOT NULL", f"outbox_{DAY:%Y%m%d}"))


def test_a_day_is_dropped(instance: dg.DagsterInstance, served: Served, database: Database) -> None:
    """Guards against a job that says it is done, and a day that stays."""
    rows = database.value("SELECT events FROM outbox_days WHERE day = %s", DAY)
    result = _run(instance, served)
    assert result.success
    assert not _is_there(database)
    (made,) = result.asset_materializations_for_node("drop")
    assert instance.get_materialized_partitions(served.key("dropped")) == {str(DAY)}
    assert metadata_of(made)["rows"] == rows
    assert _run(instance, served).success


def test_a_run_without_a_day_is_one_line(instance: dg.DagsterInstance, served: Served) -> None:
    """Guards against a stack trace for a launchpad in which no day is selected."""
    result = job_of(served, "drop_day").execute_in_process(instance=instance, raise_on_error=False)
    assert "choose a partition" in _reason(result)


def test_within_the_retention(
    instance: dg.DagsterInstance,
    served: Served,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against days that are dropped because a user materialized everything."""
    monkeypatch.setenv("OUTBOX_RETENTION_DAYS", "30")
    reason = _reason(_run(instance, served))
    assert "within the retention of 30 days" in reason
    # What this page has, not a command line.
    assert "`early: true`" in reason
    assert "outbox partitions" not in reason
    assert _is_there(database)
    assert _run(instance, served, early=True).success
    assert not _is_there(database)


def test_a_day_that_is_not_proven(instance: dg.DagsterInstance, served: Served, database: Database) -> None:
    """Guards against G6 broken: checks that failed before do not stop an asset that is run alone."""
    leaf = f"outbox_{DAY:%Y%m%d}"
    database.rows(f"ALTER TABLE {leaf} DISABLE TRIGGER outbox_append_only")
    ((id,),) = database.rows(f"DELETE FROM {leaf} WHERE ctid = '(0,1)' RETURNING id::text")
    reason = _reason(_run(instance, served))
    assert f"event {id}" in reason
    assert "\n" not in reason
    assert _is_there(database)


def _tick(instance: dg.DagsterInstance, served: Served) -> list[dg.RunRequest] | dg.SkipReason:
    at = datetime.now(UTC).replace(minute=52, second=0, microsecond=0)
    # Left to the garbage collector, it would take the instance of a later test with it.
    with dg.build_schedule_context(instance, at) as context:
        return cast("list[dg.RunRequest] | dg.SkipReason", schedule_of(served, "drop_days")(context))


def test_days_that_are_due_are_requested(
    instance: dg.DagsterInstance,
    served: Served,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a table that only grows, and a schedule that fails where nothing is to be done."""
    requests = _tick(instance, served)
    assert isinstance(requests, list)
    assert [request.partition_key for request in requests] == [str(DAY)]
    monkeypatch.setenv("OUTBOX_RETENTION_DAYS", "30")
    assert isinstance(_tick(instance, served), dg.SkipReason)
    reason = _tick(instance, serving(dsn=database.dsn))
    assert isinstance(reason, dg.SkipReason)
    assert "OUTBOX_ARCHIVE" in str(reason.skip_message)
    assert schedule_of(served, "drop_days").default_status is dg.DefaultScheduleStatus.RUNNING
