"""The job `sweep_bodies` and its schedule, on real days and a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.outbox import Outbox as Served
from tests.days.archive.days import days_ago
from tests.days.bodies.stored import DAY, Stored
from tests.defs.conftest import job_of, schedule_of, serving
from tests.schema.servers import Database


@pytest.fixture
def stored(database: Database, tmp_path: Path) -> Stored:
    (tmp_path / "bodies").mkdir()
    return Stored(database, str(tmp_path / "bodies"), tmp_path / "archive")


def _served(stored: Stored) -> Served:
    return serving(dsn=stored.database.dsn, bodies=stored.settings.bodies)


def _run(stored: Stored, **config: Any) -> dg.ExecuteInProcessResult:
    given = {"ops": {"remove_unreferenced_bodies": {"config": config}}} if config else {}
    return job_of(_served(stored), "sweep_bodies").execute_in_process(run_config=given, raise_on_error=False)


def _why(result: dg.ExecuteInProcessResult) -> tuple[str, dict[str, Any]]:
    (failure,) = [each for each in result.all_events if each.event_type is dg.DagsterEventType.STEP_FAILURE]
    data = failure.step_failure_data.user_failure_data
    assert data is not None
    return str(data.description), {name: each.value for name, each in data.metadata.items()}


def test_bodies_are_removed(stored: Stored) -> None:
    """Guards against a job that removes nothing, or that a day which is not over lets fail."""
    kept = stored.write()
    stored.put()
    stored.put(days_ago(0))
    stored.close()
    dry = _run(stored, dry_run=True)
    assert dry.success
    assert len(stored.keys()) == 2
    result = _run(stored)
    assert result.success
    assert stored.keys() == {kept}
    (output,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.STEP_OUTPUT]
    shown: dict[str, Any] = {name: each.value for name, each in output.step_output_data.metadata.items()}
    assert shown["removed"] == 1
    first, last = (each.data for each in shown["days"].records)
    assert (first["day"], first["bodies"], first["unreferenced"]) == (str(DAY), 2, 1)
    assert "the next day is not over" in last["stay because"]


def test_bodies_that_stay_fail_the_run(stored: Stored) -> None:
    """Guards against a store that grows because no run shows that its days cannot be swept."""
    stored.put(days_ago(30))
    stored.close()
    assert _run(stored).success
    why, metadata = _why(_run(stored, since=str(days_ago(30))))
    assert why.startswith(f"bodies of {days_ago(30)} stay: it is not a day of this outbox")
    assert len(metadata["days"].records) == 1
    assert "write a date" in _why(_run(stored, since="last week"))[0]


def test_it_is_there_only_if_a_store_is_configured(stored: Stored) -> None:
    """Guards against a job that every outbox shows and none needs, and a schedule of failing runs."""
    without = outbox_definitions(serving(dsn=stored.database.dsn))
    assert "sweep_bodies" not in {job.name for job in without.jobs or ()}
    assert "sweep_bodies" in {job.name for job in outbox_definitions(_served(stored)).jobs or ()}
    with dg.build_schedule_context() as context:
        assert isinstance(schedule_of(_served(stored), "sweep_bodies")(context), dg.RunRequest)
        skipped = schedule_of(serving(dsn=stored.database.dsn), "sweep_bodies")(context)
    assert isinstance(skipped, dg.SkipReason)
    assert "set OUTBOX_BODIES" in str(skipped.skip_message)
