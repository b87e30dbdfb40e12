"""The measurements of a marked table, in the terms of the checks, the metrics and Dagster's supervisor.

Invariants:
- The table counts as one shard. It has no row of its own about relays: what is not known is what does least
  harm. How long it has had no relay is the age of its oldest pending row; where no column tells it, a row
  that waits without a relay is reported at once.
"""

from __future__ import annotations

from typing import Final

from outbox_pipelines.existing import status
from outbox_pipelines.existing.status import TableStatus
from outbox_pipelines.quality.measured import Late, Measurements, ShardStatus
from outbox_pipelines.settings import Settings

_WITHOUT_KAFKA: Final = "Kafka unavailable, "
# Longer than a check allows by default.
_UNKNOWN_SECONDS: Final = 3_600.0


def read(settings: Settings) -> Measurements:
    """Return the measurements of the table that OUTBOX_TABLE names.

    Raises:
        SetupError: the database is unavailable, or the table does not match OUTBOX_TABLE.
    """
    return of(status.read(settings))


def of(found: TableStatus) -> Measurements:
    """Return a status as measurements."""
    return Measurements(
        shards=[_shard(found)],
        parked=0,
        blocked_aggregates=0,
        parked_reasons={},
        dead_letters=found.failed,
        new_dead_letters=0,
        dead_letter_reasons=found.reasons,
        days_ahead=0,
        days_late=Late(0, 0, 0),
        days_detached=0,
        table_bytes=0,
        keys=0,
        keys_bytes=0,
        oldest_transaction_seconds=0.0,
        oldest_transaction=None,
        has_ages=found.has_ages,
        connector=found.connector,
    )


def _shard(found: TableStatus) -> ShardStatus:
    age = found.oldest_seconds or 0.0
    is_silent = not found.has_ages and found.backlog > 0
    unowned = 0.0 if found.owner is not None else _UNKNOWN_SECONDS if is_silent else age
    has_kafka = found.owner is None or _WITHOUT_KAFKA not in found.owner
    return ShardStatus(
        shard=0,
        shards=1,
        owner=None if found.owner is None else found.owner.replace(_WITHOUT_KAFKA, ""),
        owned_seconds=found.owned_seconds,
        heartbeat_seconds=unowned,
        unowned_seconds=unowned,
        successor_waits=found.successor_waits,
        breaker="closed" if has_kafka else "open",
        breaker_reason=None,
        top_up_error=None,
        intruder=None,
        wanted=None,
        backlog=found.backlog,
        oldest_seconds=age,
        events_per_second=0.0,
        lag_seconds=None,
    )
