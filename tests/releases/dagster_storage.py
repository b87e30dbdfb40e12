"""What a release leaves in Dagster's storage, and definitions read again: made, written as SQL, restored.

Invariants:
- Dagster stores it, by its own storages in SQLite's files.
- Of each run's events the dump has those of assets and checks, and no snapshot of its job.
- Two runs of `relay_once` have ended, and two sessions of shard 0 have failed at once. A run of `archive_day`
  has failed for the day `CLOSED`. Two sensors have reported what they found.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData

from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.dagster_internals import LOCATION
from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.places import shard_tag
from outbox_pipelines.defs.relay.assets import config
from tests.conftest import Outbox
from tests.defs.conftest import job_of, sensor_of, served_of
from tests.defs.instances import lasting_engines, stored
from tests.quality.receivers import Webhook, webhook

HERE: Final = {LOCATION: "__repository__@outbox"}
_LEFT_OUT: Final = {
    "event_log": "DELETE FROM event_logs WHERE coalesce(dagster_event_type, '') NOT IN "
    "('ASSET_MATERIALIZATION', 'ASSET_OBSERVATION', 'ASSET_CHECK_EVALUATION')",
    "runs": "DELETE FROM snapshots",
}


@contextmanager
def opened(home: Path) -> Iterator[dg.DagsterInstance]:
    """The instance in this directory."""
    with lasting_engines(), stored(home, {"compute_logs": _UNCAPTURED}) as found:
        yield found


_UNCAPTURED: Final = {
    "module": "dagster._core.storage.noop_compute_log_manager",
    "class": "NoOpComputeLogManager",
}


@contextmanager
def hooked() -> Iterator[Webhook]:
    """A webhook that gets the alerts of each outbox, at once."""
    with webhook() as hook, pytest.MonkeyPatch.context() as patch:
        # A secret is no setting of a definition.
        patch.setenv("OUTBOX_ALERTS", hook.address)
        patch.setenv("OUTBOX_ALERT_AFTER_SECONDS", "0")
        yield hook


def alerted(hook: Webhook) -> set[str]:
    """Return what its messages are about."""
    return {body["title"].partition(": ")[2] for body in hook.bodies}


def served(outbox: Outbox, **settings: Any) -> Served:
    """The outbox in Dagster, from a day on that is before all of its days."""
    return replace(served_of(outbox, **settings), partition_start=date(2026, 1, 1))


def run(instance: dg.DagsterInstance, of: Served, job: str, day: date | None = None, **values: Any) -> bool:
    """A run that ends; whether it succeeded."""
    result = job_of(of, job).execute_in_process(
        instance=instance,
        partition_key=None if day is None else str(day),
        run_config=config(**values) if values else None,
        tags=HERE,
        raise_on_error=False,
    )
    return result.success


def fail_at_once(instance: dg.DagsterInstance, of: Served) -> None:
    """Two sessions of shard 0 that the supervisor launched, and that ended before they relayed."""
    for _ in range(2):
        job = job_of(of, "relay_session")
        tags = {**job.tags, **HERE, **shard_tag(None, of, 0)}
        session = instance.create_run_for_job(
            job, run_config=config(shard=0), status=dg.DagsterRunStatus.STARTED, tags=tags
        )
        instance.report_run_failed(session)


def tick(instance: dg.DagsterInstance, of: Served, name: str) -> dg.SensorResult:
    """A tick as the daemon runs it: from the cursor that is stored, and what it reports is stored."""
    state = _states(instance).get(name)
    cursor = state.instigator_data.cursor if state else None  # type: ignore[union-attr]
    repository = outbox_definitions(of).get_repository_def()
    with dg.build_sensor_context(instance=instance, cursor=cursor, repository_def=repository) as context:
        result = sensor_of(of, name)(context)
    assert isinstance(result, dg.SensorResult)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    data = SensorInstigatorData(last_tick_timestamp=time.time(), cursor=result.cursor)
    origin = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("outbox"), "__repository__")
    new = InstigatorState(
        RemoteInstigatorOrigin(origin, name), InstigatorType.SENSOR, InstigatorStatus.DECLARED_IN_CODE, data
    )
    instance.update_instigator_state(new) if state else instance.add_instigator_state(new)
    return result


def _states(instance: dg.DagsterInstance) -> Mapping[str, InstigatorState]:
    """The sensors that have ticked, by name."""
    found = instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
    return {state.instigator_name: state for state in found}


def last_tick(instance: dg.DagsterInstance) -> float:
    """The Unix time of the last tick that is stored."""
    times = [state.instigator_data.last_tick_timestamp for state in _states(instance).values()]  # type: ignore[union-attr]
    return max(float(each or 0.0) for each in times)


def write(home: Path, folder: Path, changed: Callable[[str], str]) -> None:
    """Write the storage of an instance that is closed into the folder of a release."""
    folder.mkdir(parents=True)
    for file in sorted((home / "files").glob("*.db")):
        with closing(sqlite3.connect(file)) as database:
            for statement in _LEFT_OUT.get(file.stem, "").splitlines():
                database.execute(statement)
            database.commit()
            (folder / f"{file.stem}.sql").write_text(changed("\n".join(database.iterdump())) + "\n")


def restore(folder: Path, home: Path) -> None:
    """Restore the storage of a release into an empty directory."""
    (home / "files").mkdir(parents=True)
    for file in folder.glob("*.sql"):
        with closing(sqlite3.connect(home / "files" / f"{file.stem}.db")) as database:
            database.executescript(file.read_text())
