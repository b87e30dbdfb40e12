"""What is measured of an outbox: the types, without what it takes to measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CAP: Final = 100_000
"""Backlog, parked events and dead letters are counted up to so many."""


@dataclass(frozen=True, slots=True)
class Late:
    """Days for which something should have happened a day ago."""

    to_close: int
    to_archive: int
    to_drop: int


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard: who relays it, and how it is doing."""

    shard: int
    shards: int
    """How many there are."""
    owner: str | None
    """The owner; None while nobody holds the shard."""
    owned_seconds: float | None
    heartbeat_seconds: float | None
    """Age of the last sign of life, whoever gave it."""
    unowned_seconds: float
    """For how long nobody has held it; 0 while somebody does."""
    successor_waits: bool
    breaker: str
    """What the owner sees of Kafka: closed (all is well), open, half-open."""
    breaker_reason: str | None
    top_up_error: str | None
    """Why its relay could not create the partitions of the coming days; None if it could."""
    intruder: str | None
    """A session that holds the shard's lock and is no relay, and how to end it; None if there is none."""
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
    days_detached: int
    """Days with a partition that is detached, by a drop that was interrupted: their rows are not seen."""
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
    def unowned_seconds(self) -> float:
        """Of the shard that has been without a relay for longest."""
        return max((shard.unowned_seconds for shard in self.shards), default=0.0)

    @property
    def shards_without_kafka(self) -> int:
        """Shards whose relay finds Kafka away."""
        return sum(shard.breaker != "closed" for shard in self.shards)


def age(seconds: float) -> str:
    """For people."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
