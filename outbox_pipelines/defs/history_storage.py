"""Delete old rows from Dagster's own tables where Dagster offers no way to do so.

Invariants:
- Only this module relies on Dagster's tables and columns and on SQLite's files.
- The newest entry that a page shows for an asset, a partition or a check stays.
- If the process is killed between two steps, the next purge removes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

# One transaction per batch: others write to the same tables, and SQLite has one lock for all of them.
BATCH: Final = 5_000

# Runs whose events a page still shows. Without its run, an archived day would be shown as missing.
RUNS_IN_VIEW: Final = """
SELECT run_id FROM event_logs WHERE id IN (
    SELECT max(id) FROM event_logs
    WHERE asset_key IS NOT NULL AND dagster_event_type IN ('ASSET_MATERIALIZATION', 'ASSET_OBSERVATION')
    GROUP BY asset_key, dagster_event_type, "partition")
UNION
SELECT run_id FROM asset_check_executions WHERE id IN (
    SELECT max(id) FROM asset_check_executions
    GROUP BY asset_key, check_name, "partition", execution_status = 'PLANNED')"""

# Results that a newer one has replaced; and their events if they have no run with which these are deleted.
OLD_VERDICTS: Final = """
SELECT id, CASE WHEN run_id = '' THEN evaluation_event_storage_id END FROM asset_check_executions
WHERE asset_key || check_name IN :checks AND evaluation_event_timestamp < :before AND id NOT IN (
    SELECT max(id) FROM asset_check_executions
    GROUP BY asset_key, check_name, "partition", execution_status = 'PLANNED')"""

# Observations without a run, except the newest of each asset and partition.
OLD_EVENTS: Final = """
SELECT id FROM event_logs
WHERE run_id = '' AND asset_key IN :assets AND timestamp < :before AND id NOT IN (
    SELECT max(id) FROM event_logs WHERE asset_key IN :assets
    GROUP BY asset_key, dagster_event_type, "partition")"""

# SQLite stores events without a run twice. Pages read the other copy; this one does not name the asset.
OLD_COPIES: Final = "SELECT id FROM event_logs WHERE timestamp < :before"

DELETE_VERDICTS: Final = "DELETE FROM asset_check_executions WHERE id IN :ids"
DELETE_EVENTS: Final = "DELETE FROM event_logs WHERE id IN :ids"
# No other statement deletes these tags.
DELETE_TAGS: Final = "DELETE FROM asset_event_tags WHERE event_id IN :ids"


def runs_in_view(instance: dg.DagsterInstance) -> set[str]:
    """Return the ids of the runs that must stay, however old.

    Raises:
        SetupError: the instance has no storage in SQL.
    """
    from sqlalchemy import text

    with _storage(instance).index_connection() as connection:
        return {run_id for (run_id,) in connection.execute(text(RUNS_IN_VIEW)) if run_id}


def delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete an ended run: its compute logs, its events, SQLite's file of them, and last the run itself."""
    # `instance.delete_run` deletes the run first: after a kill, its events could no longer be found. With
    # SQLite it also leaves the run's file, and takes 0.1 s to open and empty it.
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    storage = _storage(instance)
    with storage.index_connection() as connection:
        storage.delete_events_for_run(connection, run_id)
    if storage.is_run_sharded:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{storage.path_for_shard(run_id)}{suffix}").unlink(missing_ok=True)
    instance.run_storage.delete_run(run_id)


def delete_events(
    instance: dg.DagsterInstance,
    before: datetime,
    outbox: Outbox,
    progress: Callable[[int], None] = lambda deleted: None,
) -> int:
    """Delete results and events without a run that are older than `before`, except the newest ones.

    Args:
        before: time with a time zone.
        outbox: whose assets and checks.
        progress: called with the number of deleted rows after each batch.

    Returns:
        The number of deleted rows.

    Raises:
        SetupError: the instance has no storage in SQL.
    """
    from outbox_pipelines.defs.dagster_internals import RUNLESS_RUN_ID

    storage = _storage(instance)
    old = {"before": before.astimezone(UTC).replace(tzinfo=None)}
    # The stored form of the keys. Another project may share the instance, and the user's assets the prefix.
    assets = [key.to_string() for key in ours.assets(outbox)]
    checks = [key.asset_key.to_string() + key.name for key in ours.checks(outbox)]
    deleted = 0
    with storage.index_connection() as connection:
        verdicts = _read(connection, OLD_VERDICTS, {"checks": checks, **old})
        events = _read(connection, OLD_EVENTS, {"assets": assets, **old})
    for some in _batches(verdicts):
        of_them = [event for _, event in some if event is not None]
        with storage.index_connection() as connection:
            _delete(connection, DELETE_EVENTS, of_them)
            deleted += _delete(connection, DELETE_VERDICTS, [id for id, _ in some])
        progress(deleted)
    for some in _batches(events):
        with storage.index_connection() as connection:
            _delete(connection, DELETE_TAGS, [id for (id,) in some])
            deleted += _delete(connection, DELETE_EVENTS, [id for (id,) in some])
        progress(deleted)
    if storage.is_run_sharded:
        with storage.run_connection(RUNLESS_RUN_ID) as connection:
            copies = _read(connection, OLD_COPIES, old)
        for some in _batches(copies):
            with storage.run_connection(RUNLESS_RUN_ID) as connection:
                _delete(connection, DELETE_EVENTS, [id for (id,) in some])
    return deleted


def _storage(instance: dg.DagsterInstance) -> Any:
    from outbox_pipelines.defs.dagster_internals import SqlEventLogStorage

    storage = instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        raise SetupError(
            f"Dagster keeps its events in {type(storage).__name__}, which purge_history does not support: "
            "turn off the schedule purge_history, and remove old runs with that storage's own tools"
        )
    return storage


def _read(connection: Connection, query: str, given: dict[str, Any]) -> Sequence[Any]:
    from sqlalchemy import DateTime, bindparam, text

    lists: list[Any] = [
        bindparam(name, expanding=True) for name, value in given.items() if isinstance(value, list)
    ]
    typed = text(query).bindparams(bindparam("before", type_=DateTime), *lists)
    return connection.execute(typed, given).fetchall()


def _delete(connection: Connection, statement: str, ids: Sequence[int]) -> int:
    from sqlalchemy import bindparam, text

    if not ids:
        return 0
    typed = text(statement).bindparams(bindparam("ids", expanding=True))
    return connection.execute(typed, {"ids": ids}).rowcount


def _batches(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]
