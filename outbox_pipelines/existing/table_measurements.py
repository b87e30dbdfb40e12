"""Measures a marked table: its backlog and the age of it, its dead letters, its owner.

Invariants:
- One read. It is cheap if the table has an index over its pending rows: counts are capped.
- The table counts as one shard. It has no row of its own about relays: what is not known is what does least
  harm. How long it has had no relay is the age of its oldest pending row; where no column tells it, a row
  that waits without a relay is reported at once.
"""

from __future__ import annotations

from typing import Final

import psycopg

from outbox_pipelines.core.outages import REGISTRY
from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium import connector_reading
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import examine, existing_sql
from outbox_pipelines.existing.check import open_mapping
from outbox_pipelines.existing.table_ownership import UNAVAILABLE, awaiting, holding, shown
from outbox_pipelines.existing.table_statements import Statements
from outbox_pipelines.quality.measurements import CAP, Late, Measurements, ShardStatus
from outbox_pipelines.relay import adoption
from outbox_pipelines.relay.relay_sql import PLAN_EACH
from outbox_pipelines.settings import RelaySettings

# Longer than a check allows by default.
_UNKNOWN_SECONDS: Final = 3_600.0


@reading_only()
def read(settings: RelaySettings) -> Measurements:
    """Return the measurements of the table that OUTBOX_TABLE names.

    Raises:
        SetupError: the database is unavailable, the table is locked, or it does not match OUTBOX_TABLE.
    """
    try:
        return _read(settings)
    except psycopg.errors.LockNotAvailable:
        raise SetupError(
            f"another session has locked {open_mapping(settings)}, or waits for its lock, for more than 5 s: "
            "nothing is published until it ends; `SELECT pid, query, pg_blocking_pids(pid) FROM "
            "pg_stat_activity` shows it"
        ) from None


def _read(settings: RelaySettings) -> Measurements:
    mapping = open_mapping(settings)
    # Before the connection, which would wait for it.
    reported = connector_reading.ask(settings) if settings.connect_url else None
    with connect(settings, name="outbox: status") as connection:
        connection.execute(PLAN_EACH)
        connection.execute(existing_sql.FOR_A_WHILE)
        described, mapping = mapping, adoption.followed(connection, mapping)
        found = examine.check(connection, mapping)
        has_ages = "created_at" in mapping.columns
        statements = Statements(mapping, found.types, max_attempts=settings.max_attempts, with_time=False)
        cap = {"cap": CAP}
        ((backlog, oldest),) = connection.execute(statements(existing_sql.BACKLOG), cap).fetchall()
        retried = connection.execute(statements(existing_sql.RETRIED), cap).fetchall()
        ((failed,),) = connection.execute(statements(existing_sql.FAILURES), cap).fetchall()
        if mapping.table != described.table and not (backlog or failed):
            raise SetupError(
                f"every row of {mapping} is published, and new events of {described} wait: run `outbox adopt "
                "drain`"
            )
        reasons = connection.execute(statements(existing_sql.REASONS), cap).fetchall() if failed else []
        return Measurements(
            shards=[_shard(connection, found.oid, backlog, oldest or 0.0, has_ages=has_ages)],
            parked=0,
            blocked_aggregates=0,
            parked_reasons={},
            dead_letters=failed,
            new_dead_letters=0,
            dead_letter_reasons=dict(reasons),
            partitions_ahead=0,
            days_late=Late(0, 0, 0),
            days_detached=0,
            table_bytes=0,
            idempotency_keys=0,
            idempotency_keys_bytes=0,
            oldest_transaction_seconds=0.0,
            oldest_transaction=None,
            table=str(mapping),
            retried=int(retried[0][2]) if retried else 0,
            retried_reasons={reason: number for reason, number, _ in retried},
            warnings=found.warnings,
            has_ages=has_ages,
            connector=None if reported is None else connector_reading.combine(settings, connection, reported),
        )


def _shard(connection: Connection, oid: int, backlog: int, oldest: float, *, has_ages: bool) -> ShardStatus:
    rows = connection.execute(existing_sql.OWNER, {"key": holding(oid)}).fetchall()
    # Several, if they share the table.
    owners = sorted(shown(name, pid) for pid, name, *_ in rows)
    waiting = {
        server: [owner.removeprefix(prefix) for owner in owners if owner.startswith(prefix)]
        for server, prefix in UNAVAILABLE.items()
    }
    reasons = [
        f"{f'{server} is unavailable, ' if server == REGISTRY else ''}reported by {'; '.join(reporters)}"
        for server, reporters in waiting.items()
        if reporters
    ]
    for prefix in UNAVAILABLE.values():
        owners = [owner.removeprefix(prefix) for owner in owners]
    unowned = 0.0 if owners else oldest if has_ages or not backlog else _UNKNOWN_SECONDS
    return ShardStatus(
        shard=0,
        shards=1,
        owner="; ".join(owners) or None,
        owned_seconds=max((seconds for *_, seconds, _ in rows if seconds is not None), default=None),
        heartbeat_seconds=unowned,
        unowned_seconds=unowned,
        successor_waits=bool(connection.execute(existing_sql.OWNER, {"key": awaiting(oid)}).fetchall()),
        breaker="open" if reasons else "closed",
        breaker_reason="; ".join(reasons) or None,
        top_up_error=None,
        intruder=None,
        wanted=None,
        backlog=backlog,
        oldest_seconds=oldest,
        events_per_second=0.0,
        latency_seconds=None,
    )
