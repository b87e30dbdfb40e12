"""The check `event_types_documented`, its job and its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs.outbox import Outbox as Served
from tests.catalog.conftest import CATALOG
from tests.defs.conftest import failure_of, job_of, records_of, schedule_of, serving
from tests.schema.events import insert
from tests.schema.servers import Database


@pytest.fixture
def served(database: Database, tmp_path: Path) -> Served:
    """Of an outbox with a documented type and one that is not."""
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with database.connect() as connection:
        insert(connection)
        insert(connection, event_type="order.lost")
        insert(connection, event_type="order.lost", aggregate_type="parcel")
    return serving(dsn=database.dsn, catalog_file=str(tmp_path / "catalog.yaml"))


def run(instance: dg.DagsterInstance, served: Served) -> dg.ExecuteInProcessResult:
    job = job_of(served, "check_catalog")
    return job.execute_in_process(instance=instance, raise_on_error=False)


def test_the_job_names_what_is_not_documented(instance: dg.DagsterInstance, served: Served) -> None:
    """Guards against undocumented types that go unnoticed, and a red run for a missing text."""
    result = run(instance, served)
    assert result.success
    [status] = result.get_asset_check_evaluations()
    assert (status.asset_key, status.check_name) == (
        dg.AssetKey(["outbox", "events"]),
        "event_types_documented",
    )
    assert (status.passed, status.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert status.description == "order.lost is undocumented"
    metadata: dict[str, Any] = {name: value.value for name, value in status.metadata.items()}
    assert (metadata["offending_types"], metadata["offending_events"]) == (1, 2)
    assert metadata["never_seen"] == ["order.shipped"]
    [row] = records_of(status.metadata["offending"])
    assert row.data["event_type"] == "order.lost"
    assert (row.data["events"], row.data["aggregate_types"]) == (2, "order, parcel")


def test_it_passes_when_all_is_documented(
    instance: dg.DagsterInstance, database: Database, tmp_path: Path
) -> None:
    """Guards against a warning that cannot be cleared: a type that is never seen is none."""
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    with database.connect() as connection:
        insert(connection)
    result = run(instance, serving(dsn=database.dsn, catalog_file=str(tmp_path / "catalog.yaml")))
    [status] = result.get_asset_check_evaluations()
    assert status.passed
    assert status.description == "1 event type, all documented"


def test_without_an_event_catalog_the_run_says_what_to_set(
    instance: dg.DagsterInstance, database: Database
) -> None:
    """Guards against a check that is green because it checked nothing."""
    result = run(instance, serving(dsn=database.dsn))
    assert not result.success
    [failure] = [event for event in result.all_events if event.is_step_failure]
    assert "set OUTBOX_CATALOG_FILE" in failure_of(failure)


def test_the_schedule_skips_without_an_event_catalog(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    """Guards against a failure each day without an event catalog, and one that must be switched on."""
    schedule = schedule_of(serving(), "check_catalog")
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING

    def tick(served: Served) -> dg.RunRequest | dg.SkipReason:
        found = schedule_of(served, "check_catalog")(dg.build_schedule_context(instance=instance))
        assert isinstance(found, dg.RunRequest | dg.SkipReason)
        return found

    skipped = tick(serving())
    assert isinstance(skipped, dg.SkipReason)
    assert "set OUTBOX_CATALOG_FILE" in str(skipped.skip_message)
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    assert isinstance(tick(serving(catalog_file=str(tmp_path / "catalog.yaml"))), dg.RunRequest)
