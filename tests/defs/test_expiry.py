"""The job `expire_archive` and its schedule, on a real day."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop
from outbox_pipelines.defs.outbox import Outbox as Served
from tests.days.archive.days import days_ago, file, make_days, publish, rows, write
from tests.defs.conftest import job_of, schedule_of, serving
from tests.schema.servers import Database

DAY = days_ago(3)


@pytest.fixture
def served(database: Database, tmp_path: Path) -> Served:
    limits = {"retention_days": 1, "archive_retention_days": {"order": 2}}
    return serving(dsn=database.dsn, archive=str(tmp_path / "archive"), **limits)


def _run(served: Served, **config: Any) -> dg.ExecuteInProcessResult:
    given = {"ops": {"remove_expired_events": {"config": config}}} if config else {}
    return job_of(served, "expire_archive").execute_in_process(run_config=given, raise_on_error=False)


def test_expired_events_are_removed(database: Database, served: Served) -> None:
    """Guards against a job that removes nothing, removes in a dry run, or hides a day that stays."""
    settings = served.load_settings()
    make_days(database, DAY)
    write(database, DAY, [{"aggregate_type": "order"}, {"aggregate_type": "invoice"}])
    publish(database)
    days.archive(settings, DAY)
    drop.drop(settings, DAY)
    assert _run(served, dry_run=True).success
    assert len(rows(settings, DAY)) == 2
    content = file(settings, DAY).read_bytes()
    file(settings, DAY).write_bytes(content[:-9])
    result = _run(served)
    (failure,) = [each for each in result.all_events if each.event_type is dg.DagsterEventType.STEP_FAILURE]
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    assert str(data.description).startswith(f"events of {DAY} stay: ")
    file(settings, DAY).write_bytes(content)
    result = _run(served)
    assert result.success
    (output,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.STEP_OUTPUT]
    assert output.step_output_data.metadata["removed"].value == 1
    assert [row["aggregate_type"] for row in rows(settings, DAY)] == ["invoice"]


def test_the_schedule_runs_where_a_retention_is_set(served: Served) -> None:
    """Guards against events that are removed, or a nightly failure, where none expire."""
    context = dg.build_schedule_context()
    assert isinstance(schedule_of(served, "expire_archive")(context), dg.RunRequest)
    without = serving(dsn="postgresql://127.0.0.1:1/none", archive_retention_days={"*": 400})
    skipped = schedule_of(without, "expire_archive")(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "set OUTBOX_ARCHIVE and OUTBOX_ARCHIVE_RETENTION_DAYS" in str(skipped.skip_message)
