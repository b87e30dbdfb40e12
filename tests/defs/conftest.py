"""Runs and shards as the tests of the definitions need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from outbox_pipelines.defs import health, inbox, outbox_definitions
from outbox_pipelines.defs.alerts import alerts_sensor
from outbox_pipelines.defs.build import JOBS, SCHEDULES
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.relay.assets import relay_session
from outbox_pipelines.defs.relay.sensors import relay_supervisor
from outbox_pipelines.relay.lease.shard import Shard
from tests.conftest import Outbox
from tests.defs import instances
from tests.schema.servers import database, server, template

__all__ = ["database", "server", "template"]

Hold = Callable[[str], Shard]
RELAY = dg.AssetKey(["outbox", "relay"])


# Capturing redirects the whole process's output, which runs in two threads would undo for each other.
_UNCAPTURED: dict[str, Any] = {
    "compute_logs": {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
}


@pytest.fixture(scope="session", autouse=True)
def engines() -> Iterator[None]:
    with instances.lasting_engines():
        yield


@pytest.fixture(scope="session")
def without_runs(engines: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an instance without runs, to be copied."""
    home = tmp_path_factory.mktemp("template")
    with instances.stored(home):
        return home


@pytest.fixture(scope="session")
def storage(without_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """The instance of all tests that need no settings of their own."""
    home = tmp_path_factory.mktemp("dagster")
    with instances.stored(home, _UNCAPTURED, template=without_runs) as found:
        yield found


@pytest.fixture(scope="session")
def sharded(engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """An instance with a file for each run, as Dagster makes it without settings."""
    overrides = _UNCAPTURED | {"telemetry": {"enabled": False}}
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster")), overrides=overrides) as found:
        yield found


@pytest.fixture
def instance(storage: dg.DagsterInstance) -> dg.DagsterInstance:
    """An instance without runs, in which no sensor has ticked."""
    storage.wipe()
    assert storage.schedule_storage is not None
    storage.schedule_storage.wipe()
    return storage


@pytest.fixture
def served(outbox: Outbox) -> Served:
    return served_of(outbox)


def serving(**settings: Any) -> Served:
    """An outbox of Dagster with these settings; all others come from the environment."""
    return Served(settings=settings, automation="running")


def served_of(outbox: Outbox, **overrides: Any) -> Served:
    """The test's outbox in Dagster."""
    settings = outbox.settings
    given = {"dsn": settings.dsn, "kafka": settings.kafka, "topic": settings.topic} | overrides
    return serving(**{name: value for name, value in given.items() if value is not None})


# With these settings every part of the append-only outbox has work, and there is a connector.
EVERYTHING: dict[str, Any] = {
    "archive_retention_days": {"*": 3653},
    "bodies": "s3://bucket/bodies",
    "catalog_file": "catalog.yaml",
    "connect_url": "http://127.0.0.1:8083",
    "drain_consumers": "shop:consumer",
    "iceberg": "lake",
}
# With these, every part of an existing table.
OF_TABLE: dict[str, Any] = {
    "clean_after_hours": 24,
    "drain_consumers": "shop:consumer",
    "months_ahead": 3,
    "table": {"name": "events", "columns": {"published_at": "published_at"}},
}


def job_of(served: Served, name: str) -> dg.JobDefinition:
    """A job of an outbox in Dagster, also one that the outbox leaves out because it has no work."""
    served = copy(served)
    object.__setattr__(served, "is_set", lambda *settings: "connect" not in settings)
    made = (make(served) for makers in JOBS.values() for make in makers)
    job = next(each for each in made if each.name == served.name_of(name))
    return job if isinstance(job, dg.JobDefinition) else outbox_definitions(served).resolve_job_def(job.name)


def sensor_of(served: Served, name: str) -> dg.SensorDefinition:
    """A sensor of an outbox in Dagster, made alone: all definitions would take a second on a busy machine."""
    one = [served]
    if name == "relay_supervisor":
        return relay_supervisor(one, [relay_session(served)])
    if name == "health":
        return health.health_sensor(one, [health.check_health(served)])
    if name == "inbox":
        return inbox.inbox_sensor(one, [inbox.drain_inbox(served)])
    return alerts_sensor(one)


def schedule_of(served: Served, name: str) -> dg.ScheduleDefinition:
    """A schedule of an outbox in Dagster."""
    made: Iterator[dg.ScheduleDefinition] = (make(served) for makers in SCHEDULES.values() for make in makers)
    return next(each for each in made if each.name == served.name_of(name))


@pytest.fixture
def hold(outbox: Outbox) -> Iterator[Hold]:
    """Own the shard under a name, after a wait if it has an owner, until the test ends."""
    patient = outbox.settings.model_copy(update={"lease_seconds": 300.0})
    with ExitStack() as places:

        def take(owner: str) -> Shard:
            place = Shard(patient, 0, owner)
            places.callback(place.close)
            assert place.try_take() or place.try_wait()
            return place

        yield take


def run(
    job: str, instance: dg.DagsterInstance, served: Served
) -> tuple[dg.ExecuteInProcessResult, dict[str, Any] | None]:
    """A run to its end, and the metadata of what it materialized."""
    result = job_of(served, job).execute_in_process(instance=instance, raise_on_error=False)
    materialized = result.asset_materializations_for_node("relay_shard")
    return result, metadata_of(materialized[0]) if materialized else None


def metadata_of(event: dg.AssetMaterialization | dg.AssetObservation) -> dict[str, Any]:
    return {name: value.value for name, value in event.metadata.items()}


def failure_of(event: dg.DagsterEvent | None) -> str:
    """Why a step failed, as Dagster shows it."""
    assert event is not None
    failure = event.step_failure_data.user_failure_data
    assert failure is not None
    return str(failure.description)


def records_of(value: dg.MetadataValue[Any]) -> list[dg.TableRecord]:
    """The rows of a table among metadata."""
    assert isinstance(value, dg.TableMetadataValue)
    return list(value.records)


def observed(instance: dg.DagsterInstance, run_id: str, *, topics: bool = False) -> list[dg.AssetObservation]:
    """What a run has observed of the relay, or of topics instead."""
    records = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    found = [
        record.dagster_event.asset_observation_data.asset_observation
        for record in records
        if record.dagster_event is not None
    ]
    return [each for each in found if (each.asset_key != RELAY) is topics]
