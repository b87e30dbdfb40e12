"""The job `register_days` and its schedule, on a real day and a real catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.defs.outbox import Outbox as Served
from tests.days.archive.days import past_day
from tests.days.iceberg.conftest import lake, table
from tests.defs.conftest import job_of, schedule_of, serving
from tests.schema.servers import Database

__all__ = ["lake"]


@pytest.fixture
def served(database: Database, lake: str, tmp_path: Path) -> Served:
    return serving(dsn=database.dsn, archive=str(tmp_path / "archive"), iceberg=lake)


def _run(served: Served) -> dg.ExecuteInProcessResult:
    return job_of(served, "register_days").execute_in_process(raise_on_error=False)


def test_days_are_registered(database: Database, served: Served, lake: str) -> None:
    """Guards against a job that fails before the first day, and one that hides what another engine did."""
    assert _run(served).success
    day = past_day(database)
    days.archive(served.load_settings(), day)
    result = _run(served)
    assert result.success
    (output,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.STEP_OUTPUT]
    shown: dict[str, Any] = {name: each.value for name, each in output.step_output_data.metadata.items()}
    assert (shown["table"], shown["added"]) == ("outbox.events", str(day))
    table(lake).delete("seq > 0")
    result = _run(served)
    (failure,) = [each for each in result.all_events if each.event_type is dg.DagsterEventType.STEP_FAILURE]
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert str(data.description).startswith(f"{day}: another engine has removed events-")


def test_the_schedule_runs_where_a_catalog_is_set(served: Served) -> None:
    """Guards against an hourly failure where no table is wanted."""
    context = dg.build_schedule_context()
    assert isinstance(schedule_of(served, "register_days")(context), dg.RunRequest)
    without = serving(dsn="postgresql://127.0.0.1:1/none", iceberg="lake")
    skipped = schedule_of(without, "register_days")(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "set OUTBOX_ARCHIVE and OUTBOX_ICEBERG" in str(skipped.skip_message)
