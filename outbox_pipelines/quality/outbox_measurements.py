"""Measure the outbox for the status, the checks, the alerts and the metrics.

Invariants:
- One statement, cheap even for large tables: counts are capped, the range comes from the position. With
  Debezium (OUTBOX_CONNECT_URL) two more, and a few seconds for Kafka Connect at most.
- Nothing here judges: the limits are in `rules.py`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from outbox_pipelines.core import sequence
from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.database import connect
from outbox_pipelines.database.schema import no_position, require_schema
from outbox_pipelines.debezium import connector_reading
from outbox_pipelines.quality import quality_sql
from outbox_pipelines.quality.measurements import CAP, Late, Measurements, OpenReplay, ShardStatus
from outbox_pipelines.quality.slots import OtherSlot, Slots
from outbox_pipelines.settings import DaySettings, OutboxSettings

_NO_OUTBOX: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
)
# A generic plan reads whole partitions. Without sorts, rows come in the order of an index up to the cap; the
# planner expects few, and would read and sort a backlog.
TUNE: Final = "SET plan_cache_mode = force_custom_plan; SET enable_sort = off"


@reading_only()
def read(settings: DaySettings) -> Measurements:
    """Return the measurements, in one round trip after those of the connection.

    Raises:
        LockedError: another session has locked a table.
        SetupError: the database is unavailable, or has no outbox.
    """
    lock = f"{settings.db_schema}.outbox_shards"
    given = {
        "cap": CAP,
        "lock": lock,
        "waiting": f"{lock}.next",
        "fleet": f"{lock}.fleet",
        "setup_lock": f"{settings.db_schema}.outbox_cdc",
        "archives": settings.archives,
        "drops_unarchived": settings.archive == "none",
        "retention": settings.retention_days,
    }
    # Before the connection, which would wait for it.
    reported = connector_reading.ask(settings) if settings.connect_url else None
    with connect(settings, name="outbox: status") as connection:
        connection.execute(TUNE)
        try:
            row = connection.cursor(row_factory=dict_row).execute(quality_sql.MEASURE, given).fetchone()
        except _NO_OUTBOX:
            # It names what is missing, as for every command.
            require_schema(settings)
            raise
        of_debezium = None if reported is None else connector_reading.combine(settings, connection, reported)
    assert row is not None
    if row["slots"] is None:
        raise no_position(settings.db_schema)
    age, whose = row["oldest_transaction"] or (0.0, None)
    return Measurements(
        shards=[ShardStatus(**shard) for shard in row["shards"]],
        **row["parked"],
        parked_reasons=dict(row["parked_reasons"]),
        **row["dead_letters"],
        dead_letter_reasons=dict(row["dead_letter_reasons"]),
        **row["delayed"],
        delayed_reasons=dict(row["delayed_reasons"]),
        replays=[OpenReplay(**replay) for replay in row["replays"]],
        partitions_ahead=row["partitions_ahead"],
        days_late=Late(**row["days_late"]),
        days_detached=row["days_detached"],
        table_bytes=int(row["table_bytes"]),
        **row["keys"],
        oldest_transaction_seconds=float(age),
        oldest_transaction=whose,
        draining=row["draining"],
        sequence_problem=sequence.behind(*row["sequence"]),
        slots=slots(row["slots"]),
        connector=of_debezium,
    )


def read_what_is_not_locked(settings: OutboxSettings) -> dict[str, Any]:
    """Return the parts of the measurements that no lock of another session conceals; not for long."""
    lock = f"{settings.db_schema}.outbox_shards"
    found = {}
    with connect(settings, name="outbox: status") as connection:
        connection.execute("SET lock_timeout = 100")
        for name, query in quality_sql.ALONE.items():
            with suppress(psycopg.errors.LockNotAvailable):
                row = connection.execute(query, {"cap": CAP, "lock": lock}).fetchone()
                found[name] = row[0] if row else None
    return found


def slots(found: dict[str, Any]) -> Slots:
    """Return the slots that concern the outbox, from the row of `quality_sql.SLOTS`."""
    return Slots(**{**found, "others": [OtherSlot(**other) for other in found["others"]]})
