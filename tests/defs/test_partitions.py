"""The job `maintain_partitions` and its check: days ahead, kept by Dagster."""

from __future__ import annotations

import dagster as dg

from outbox_pipelines.definitions import defs
from outbox_pipelines.defs.partitions import maintain_partitions, partitions_ahead
from tests.conftest import Outbox
from tests.defs.conftest import resource_of
from tests.partitions.test_partitions import DAYS_GO_BY

CHECK = dg.AssetCheckKey(dg.AssetKey(["outbox", "events"]), "partitions_ahead")


def _passed(instance: dg.DagsterInstance) -> bool:
    record = instance.event_log_storage.get_latest_asset_check_execution_by_key([CHECK])[CHECK]
    assert record.event is not None
    evaluation = record.event.dagster_event
    assert evaluation is not None
    return bool(evaluation.asset_check_evaluation_data.passed)


def test_the_job_makes_days_and_reports_the_check(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a check that shows green because nobody has looked since."""
    with outbox.connect() as connection:
        connection.execute(DAYS_GO_BY.format(days=10).encode())
    resources = {"outbox": resource_of(outbox)}
    result = maintain_partitions.execute_in_process(instance=instance, resources=resources)
    (output,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_OUTPUT]
    metadata = output.step_output_data.metadata
    assert (metadata["made"].value, metadata["days_ahead"].value) == (10, 14)
    assert _passed(instance)


def test_the_check_fails_with_few_days(outbox: Outbox) -> None:
    """Guards against an alarm that comes when the last day is over."""
    with outbox.connect() as connection:
        connection.execute(DAYS_GO_BY.format(days=7).encode())
        assert partitions_ahead(resource_of(outbox)).passed
        connection.execute(DAYS_GO_BY.format(days=1).encode())
    found = partitions_ahead(resource_of(outbox))
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.ERROR
    assert found.metadata["days_ahead"].value == 6


def test_a_failure_says_what_to_mend(outbox: Outbox, instance: dg.DagsterInstance) -> None:
    """Guards against a run whose error is a stack trace."""
    resources = {"outbox": resource_of(outbox, db_schema="elsewhere")}
    result = maintain_partitions.execute_in_process(
        instance=instance, resources=resources, raise_on_error=False
    )
    (failed,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.STEP_FAILURE]
    assert "run `outbox migrate`" in str(failed.step_failure_data.user_failure_data.description)


def test_it_runs_by_itself() -> None:
    """Guards against a schedule that somebody must find and switch on."""
    schedule = defs().resolve_schedule_def("maintain_partitions")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert schedule.job_name == "maintain_partitions"
