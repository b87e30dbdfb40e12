"""What these definitions use of Dagster and its documentation does not name; no other file uses such a name.

This module is imported within functions: if a new version moves a name, one job fails, not all definitions.

Checked with the versions in `CHECKED`: a test fails if another version is installed, so that an upgrade of
Dagster starts here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetsDefinition,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    EventLogEntry,
)
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext, DefinitionsLoadType
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.storage.asset_check_execution_record import (
    COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES,
)

CHECKED = ("1.13",)
"""Versions of Dagster, as major.minor."""


LOCATION = ".dagster/repository"
"""Dagster stores this tag with every run that its web server or daemon starts: the run's code location."""


def location_of(run: DagsterRun) -> str | None:
    """Return the value of the tag LOCATION of a run; None if nothing started it."""
    return run.tags_for_storage().get(LOCATION)


def set_io_manager_key(definition: AssetsDefinition, key: str) -> None:
    """Set the resource that stores outputs and loads inputs, also where Dagster has no parameter for it."""
    for output in definition.node_def.output_defs:
        output._io_manager_key = key
    for needed in definition.node_def.input_defs:
        needed._input_manager_key = key


def delete_run(instance: DagsterInstance, run_id: str) -> None:
    """Delete an ended run, and what Dagster leaves of one: captured output, SQLite's file."""
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    instance.delete_run(run_id)
    storage: Any = instance.event_log_storage
    if getattr(storage, "is_run_sharded", False):
        for suffix in ("", "-wal", "-shm"):
            Path(f"{storage.path_for_shard(run_id)}{suffix}").unlink(missing_ok=True)


def latest_results(
    instance: DagsterInstance, checks: Sequence[AssetCheckKey]
) -> Mapping[AssetCheckKey, AssetCheckEvaluation]:
    """Return the last result of each check that has one."""
    records = instance.event_log_storage.get_latest_asset_check_execution_by_key(checks)
    return {key: record.evaluation for key, record in records.items() if record.evaluation is not None}


def completed_results(instance: DagsterInstance, check: AssetCheckKey, limit: int) -> list[Any]:
    """Return the newest records of a check; not those that are planned, or whose run crashed."""
    records = instance.event_log_storage.get_asset_check_execution_history(check, limit=limit)
    return [record for record in records if record.status in COMPLETED_ASSET_CHECK_EXECUTION_RECORD_STATUSES]


def events_of(
    instance: DagsterInstance, run_id: str, types: set[DagsterEventType]
) -> Sequence[EventLogEntry]:
    """Return the events of a run that have one of these types, in their order."""
    return instance.all_logs(run_id, of_type=types)


def sensor_states(instance: DagsterInstance) -> Sequence[Any]:
    """Return the states of the sensors of all code locations."""
    return instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)


def queue_settings(instance: DagsterInstance) -> Any:
    """Return the settings of the run queue; None if runs are not queued."""
    return instance.get_concurrency_config().run_queue_config


def longest_run(instance: DagsterInstance) -> int:
    """Return after how many seconds run monitoring ends a run; 0 for never."""
    return instance.run_monitoring_max_runtime_seconds if instance.run_monitoring_enabled else 0


def start_seconds(instance: DagsterInstance) -> float:
    """Return how many seconds run monitoring gives a run to start."""
    return float(instance.run_monitoring_start_timeout_seconds)


def last_heartbeat(instance: DagsterInstance, daemon: str) -> float:
    """Return the Unix time of a daemon's last heartbeat; 0 if there is none."""
    beat = instance.get_daemon_heartbeats().get(daemon)
    return beat.timestamp if beat else 0.0


def tag_run(instance: DagsterInstance, run_id: str, tags: Mapping[str, str]) -> None:
    """Add tags to a run, or replace their values."""
    instance.add_run_tags(run_id, tags)


def fail_run(instance: DagsterInstance, run: DagsterRun, why: str) -> None:
    """Mark a run as failed whose process has ended."""
    instance.report_run_failed(run, why)


__all__ = ["CHECKED", "LOCATION", "DefinitionsLoadContext", "DefinitionsLoadType"]
