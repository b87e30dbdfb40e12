"""How an outbox is doing, in numbers: what the status, the checks, the alerts and the metrics all speak of.

Invariants:
- One statement, cheap however large the table: counts are capped, the range comes from the position.
- Nothing here judges: what is too much stands in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.rows import dict_row

from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.partitions.calendar import Late
from outbox_pipelines.quality import queries
from outbox_pipelines.settings import Settings

CAP: Final = 100_000
"""Backlog, parked events and dead letters are counted up to so many."""

_NO_OUTBOX: Final = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
)
# A generic plan reads whole partitions, and compiling one costs more than running it.
_TUNE: Final = "SET jit = off; SET plan_cache_mode = force_custom_plan; SET TimeZone = 'UTC'"


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard: who relays it, and how it is doing."""

    shard: int
    shards: int
    """How many there are."""
    owner: str | None
    """The holder; None while nobody holds the shard."""
    held_seconds: float | None
    heartbeat_seconds: float | None
    """Age of the last sign of life, whoever gave it."""
    unheld_seconds: float
    """For how long nobody has held it; 0 while somebody does."""
    successor_waits: bool
    breaker: str
    """What the holder sees of Kafka: closed (all is well), open, half-open."""
    breaker_reason: str | None
    wanted: int | None
    """How many shards there are to be, while that is being changed."""
    backlog: int
    """Committed events that are not published, counted up to `CAP`."""
    oldest_seconds: float
    """Age of the oldest of them; 0 without a backlog."""
    events_per_second: float
    """Published over the last minute."""
    lag_seconds: float | None
    """From commit to settled, of the newest event published; None before the first."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The state of one outbox."""

    shards: list[ShardStatus]
    parked: int
    """Events that wait for a retry, and those of their aggregates behind them; up to `CAP`."""
    blocked_aggregates: int
    """Aggregates of which an event is parked."""
    parked_reasons: dict[str, int]
    """Why, of the first event of each blocked aggregate: the three most frequent, with their counts."""
    dead_letters: int
    """Events that were given up and not dealt with; up to `CAP`."""
    new_dead_letters: int
    """Those of the last hour."""
    dead_letter_reasons: dict[str, int]
    """Why: the ten most frequent, with their counts."""
    days_ahead: int
    """Whole days from tomorrow that have a partition."""
    days_late: Late
    """Days for which something should have happened."""
    table_bytes: int
    """Of the outbox's partitions, with their indexes."""
    keys: int
    """About so many idempotency keys are remembered."""
    keys_bytes: int
    oldest_transaction_seconds: float
    """Age of the oldest transaction that is open in this database, prepared ones too; 0 without any."""
    oldest_transaction: str | None
    """Whose it is."""

    @property
    def unpublished(self) -> int:
        """Committed events that are not published, counted up to `CAP`."""
        return min(CAP, sum(shard.backlog for shard in self.shards))

    @property
    def oldest_unpublished_seconds(self) -> float:
        """Age of the oldest of them; 0 without any."""
        return max((shard.oldest_seconds for shard in self.shards), default=0.0)

    @property
    def events_per_second(self) -> float:
        """Published over the last minute, by all shards."""
        return sum(shard.events_per_second for shard in self.shards)

    @property
    def unheld_seconds(self) -> float:
        """Of the shard that has been without a relay for longest."""
        return max((shard.unheld_seconds for shard in self.shards), default=0.0)

    @property
    def shards_without_kafka(self) -> int:
        """Shards whose relay finds Kafka away."""
        return sum(shard.breaker != "closed" for shard in self.shards)


def read(settings: Settings) -> Measurements:
    """Measures, in one round trip after those that connect.

    Raises:
        SetupError: the database is away, or has no outbox.
    """
    lock = f"{settings.db_schema}.outbox_shards"
    given = {
        "cap": CAP,
        "lock": lock,
        "waiting": f"{lock}.next",
        "archives": settings.archives,
        "drops_unarchived": settings.archive == "none",
        "retention": settings.retention_days,
    }
    with connect(settings, name="outbox: status") as connection:
        connection.execute(_TUNE)
        try:
            row = connection.cursor(row_factory=dict_row).execute(queries.MEASURE, given).fetchone()
        except _NO_OUTBOX:
            raise SetupError(
                f"no outbox in schema {settings.db_schema!r} (OUTBOX_SCHEMA): run `outbox migrate`"
            ) from None
    assert row is not None
    age, whose = row["old_transaction"] or (0.0, None)
    return Measurements(
        shards=[ShardStatus(**shard) for shard in row["shards"]],
        **row["parked"],
        parked_reasons=dict(row["parked_reasons"]),
        **row["dead_letters"],
        dead_letter_reasons=dict(row["dead_letter_reasons"]),
        days_ahead=row["days_ahead"],
        days_late=Late(**row["days_late"]),
        table_bytes=int(row["table_bytes"]),
        **row["keys"],
        oldest_transaction_seconds=float(age),
        oldest_transaction=whose,
    )


def age(seconds: float) -> str:
    """For people."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
