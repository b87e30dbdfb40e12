"""The measurements of an outbox: types only, importable without a database driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.core.text import short
from outbox_pipelines.debezium.connector_state import Connector
from outbox_pipelines.quality.slots import Slots

CAP: Final = 100_000
"""Counting of backlog, parked events and dead letters stops here."""
STILL_SECONDS: Final = 60.0
"""Seconds without a report after which a running replay counts as stopped; it reports once a second."""


@dataclass(frozen=True, slots=True)
class Late:
    """Days for which something should have happened a day ago."""

    to_close: int
    to_archive: int
    to_drop: int


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard: its owner and its progress."""

    shard: int
    shards: int
    """Number of shards."""
    owner: str | None
    """None while no relay owns the shard."""
    owned_seconds: float | None
    heartbeat_seconds: float | None
    """Age of the last heartbeat, of any owner."""
    unowned_seconds: float
    """How long it has had no owner; 0 while it has one."""
    successor_waits: bool
    breaker: str
    """The breaker of its relay: closed (Kafka is reachable), open, half-open."""
    breaker_reason: str | None
    top_up_error: str | None
    """Why its relay could not create the partitions of the coming days; None if it could."""
    intruder: str | None
    """A session that holds the shard's lock and is not a relay, and how to end it; usually None."""
    wanted: int | None
    """The new number of shards, during a change."""
    backlog: int
    """Committed events that are not published, counted up to `CAP`."""
    oldest_seconds: float
    """Age of the oldest of them; 0 without a backlog."""
    events_per_second: float
    """Published over the last minute."""
    latency_seconds: float | None
    """From commit to settled, of the newest event published; None before the first."""
    awaits_standby: bool = False
    """Whether a commit of its relay has waited for a synchronous standby for more than 5 s."""


@dataclass(frozen=True, slots=True)
class OpenReplay:
    """A replay that runs, or can be resumed."""

    id: str
    started_at: str
    by: str
    """On whose behalf, otherwise the role."""
    reason: str
    target: str
    """A template of the topics."""
    events: int
    """How many were selected."""
    sent: int
    state: str
    """running or stopped."""
    error: str | None
    """Why it stopped; null if it was stopped on purpose."""
    silent_seconds: float
    """Since its process has reported anything; 0 if it is stopped."""

    @property
    def line(self) -> str:
        """Return it in words."""
        stands_still = self.silent_seconds >= STILL_SECONDS
        state = f"stands still for {age(self.silent_seconds)}" if stands_still else self.state
        return (
            f"{self.id}  {state}  {self.sent:,} of {self.events:,} sent to {self.target}  "
            f"by {self.by}: {short(self.reason)}" + (f"  ({short(self.error)})" if self.error else "")
        )


@dataclass(frozen=True, slots=True)
class Measurements:
    """The state of one outbox."""

    shards: list[ShardStatus]
    parked: int
    """Events to be retried, and the later events of their aggregates; up to `CAP`."""
    blocked_aggregates: int
    """Aggregates that have parked events."""
    parked_reasons: dict[str, int]
    """Reasons of the first event of each blocked aggregate: the three most frequent, with their counts."""
    dead_letters: int
    """Dead letters that are neither replayed nor discarded; up to `CAP`."""
    new_dead_letters: int
    """Those of the last hour."""
    dead_letter_reasons: dict[str, int]
    """Reasons: the ten most frequent, with their counts."""
    partitions_ahead: int
    """Whole days from tomorrow that have a partition, up to the first that has none."""
    days_late: Late
    """Days for which something should have happened."""
    days_detached: int
    """Days whose partition an interrupted drop has left detached: their rows are not visible."""
    table_bytes: int
    """Of the outbox's partitions, with their indexes."""
    idempotency_keys: int
    """Their approximate number."""
    idempotency_keys_bytes: int
    oldest_transaction_seconds: float
    """Age of the oldest open or prepared transaction of this database; 0 without any."""
    oldest_transaction: str | None
    """Its session."""
    delayed: int = 0
    """Events that are delayed until they are due, and those that wait for them; up to `CAP`."""
    delayed_next_due_seconds: float | None = None
    """Until the next of them is due; None if none is."""
    delayed_overdue: int = 0
    """Those that are due and are not in the outbox yet; up to `CAP`."""
    delayed_overdue_seconds: float = 0.0
    """For how long the oldest of these has been due; 0 without any."""
    delayed_unmoved_seconds: float = 0.0
    """The same of those that nothing has tried to move."""
    delayed_reasons: dict[str, int] = field(default_factory=dict)
    """Why others could not be moved: the three most frequent reasons, with their counts."""
    replays: list[OpenReplay] = field(default_factory=list)
    """Replays that run or can be resumed: those that run, then the newest; at most 20."""
    table: str | None = None
    """The existing table that is relayed; None for the append-only outbox."""
    retried: int = 0
    """Rows of an existing table that were rejected and are tried again, counted among the first `CAP`."""
    retried_reasons: dict[str, int] = field(default_factory=dict)
    """Their reasons: the three most frequent, with their counts."""
    warnings: list[str] = field(default_factory=list)
    """What to correct in an existing table."""
    has_ages: bool = True
    """Whether the age of an event is known: not in an existing table without a created_at."""
    draining: str | None = None
    """The table whose remaining rows are published first, after `outbox adopt switch`."""
    sequence_problem: str | None = None
    """Why relays refuse to run: the sequence gives numbers that the outbox has already."""
    slots: Slots | None = None
    """The replication slots that concern the outbox; None for an existing table."""
    connector: Connector | None = None
    """Debezium's connector; None without OUTBOX_CONNECT_URL."""

    @property
    def has_days(self) -> bool:
        """Whether there are days, keys and parked events: not in an existing table."""
        return self.table is None

    @property
    def unpublished(self) -> int:
        """Committed events that are not published, counted up to `CAP`."""
        return min(CAP, sum(shard.backlog for shard in self.shards))

    @property
    def oldest_unpublished_seconds(self) -> float:
        """Age of the oldest of them, or of a delayed one since it has been due; 0 without any."""
        return max((self.delayed_unmoved_seconds, *(shard.oldest_seconds for shard in self.shards)))

    @property
    def waiting(self) -> str | None:
        """What relays wait for before they take a shard; None if for nothing."""
        if self.is_copy:
            return (
                "the position was made in another database (a restored dump or a copy), and relays refuse "
                "it: run `outbox relay --rebase` before any writer starts"
            )
        if self.sequence_problem is not None:
            return self.sequence_problem
        if self.draining is None:
            return None
        return f"relays wait for the remaining rows of {self.draining}: run `outbox adopt drain`"

    @property
    def changing(self) -> str | None:
        """What a change of the number of shards does to publishing; None without a change."""
        wanted = next((shard.wanted for shard in self.shards if shard.wanted is not None), None)
        if wanted is None:
            return None
        return (
            f"changing from {len(self.shards)} to {wanted}: publishing pauses until `outbox shards set` "
            "ends; if it was killed, for ten seconds"
        )

    @property
    def events_per_second(self) -> float:
        """Published over the last minute, by all shards."""
        return sum(shard.events_per_second for shard in self.shards)

    @property
    def is_copy(self) -> bool:
        """Whether the position is that of another database: every relay refuses it."""
        return self.slots is not None and self.slots.copy

    @property
    def unowned_seconds(self) -> float:
        """The longest time that a shard has had no owner; an hour if no relay can own it."""
        times = [3600.0] if self.is_copy or self.sequence_problem else []
        return max((*times, *(shard.unowned_seconds for shard in self.shards)), default=0.0)

    @property
    def replay_silent_seconds(self) -> float:
        """The longest time for which a running replay has reported nothing; 0 without any."""
        return max((each.silent_seconds for each in self.replays), default=0.0)

    @property
    def shards_without_kafka(self) -> int:
        """Shards whose relay cannot reach Kafka."""
        return sum(shard.breaker != "closed" for shard in self.shards)

    @property
    def slot_problems(self) -> list[str]:
        """What is wrong with the outbox's replication slot, each with the remedy."""
        return [] if self.slots is None else self.slots.problems

    @property
    def slot_log(self) -> tuple[int, str]:
        """The most bytes of its log that the server keeps for a slot of this database, and for which."""
        return (0, "") if self.slots is None else self.slots.most_retained

    @property
    def connector_problems(self) -> list[str]:
        """What is wrong with Debezium's connector, each with the remedy."""
        if self.connector is None:
            return []
        # While a relay publishes, none is needed: OUTBOX_CONNECT_URL may be set before the change.
        is_missing = self.connector.state is None and self.connector.error is None
        if is_missing and any(shard.owner for shard in self.shards):
            return []
        return self.connector.problems

    @property
    def unconfirmed_seconds(self) -> float:
        """Age of the oldest event that Debezium has not confirmed; 0 without any."""
        return 0.0 if self.connector is None else self.connector.waiting_seconds


def age(seconds: float) -> str:
    """Return a duration for people."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
