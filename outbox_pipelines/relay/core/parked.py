"""Parked events as the core sees them: attempts, the pauses between, what it asks of table and prober."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.blocked import Aggregate

LONGEST_PAUSE: Final = 300.0
"""Between two attempts at a parked event, in seconds."""
DEATH_PAUSE: Final = 3.0
"""The pause after a relay crashed while it tried an event alone, as a multiple of OUTBOX_RETRY_SECONDS; four
times as long after the second crash. If the process is killed from outside every few seconds, this rarely
happens during the event's next attempt."""
CRASHED: Final = "the relay crashed while this event was being published"
# Seconds after which a missing topic, or an unavailable Kafka, is tried again.
_TOPIC_SECONDS: Final = 10.0
_OUTAGE_SECONDS: Final = 1.0


class RetryPolicy(NamedTuple):
    """How often an event is tried."""

    max_attempts: int
    """Refusals that make a dead letter."""
    retry_seconds: float
    """The pause after the first refusal."""


class ParkedEvent(NamedTuple):
    """A row of `outbox_parked`, without its content."""

    event: Event
    """Payload and metadata are empty."""
    state: str
    attempts: int = 0
    due_in: float = 0.0
    """Seconds until its next attempt; 0 or less if that is due."""
    crashes: int = 0
    is_covered: bool = True
    """Whether the position is past it: until then it is read again."""

    @property
    def seq(self) -> int:
        return self.event.seq

    @property
    def aggregate(self) -> Aggregate:
        return Aggregate(self.event.aggregate_type, self.event.aggregate_id)


class TakenOver(NamedTuple):
    """An event that was being tried when a relay ended, as it is now."""

    event: Event
    was: str
    """Its state before."""
    state: str
    attempts: int
    error: str | None
    is_alone: bool
    """Whether nothing else was being tried."""
    crashes: int
    due_in: float


class Table(Protocol):
    """The parked events of a shard, in the session that holds it. Each call is one transaction."""

    def take_over(self, *, crashed: bool) -> list[TakenOver]:
        """Update the events that were being tried when the previous relay ended; return them."""

    def news(self) -> int:
        """Return a number that changes with each replay or discard."""

    def blocked(self) -> Iterable[tuple[str, str]]:
        """All aggregates that have parked events."""

    def heads(self, aggregates: Sequence[Aggregate]) -> list[ParkedEvent]:
        """The first event of each that blocks it; none of one that is free."""

    def behind(self, aggregates: Sequence[Aggregate], limit: int) -> list[ParkedEvent]:
        """Of each, those that may go: up to the next one that must be tried alone."""

    def replays(self, limit: int) -> list[ParkedEvent]:
        """Dead letters that are to be tried again: of each aggregate the first that is due."""

    def has_replays(self) -> bool:
        """Whether there are any, due or not."""

    def mark(self, seqs: Sequence[int]) -> None:
        """Mark these as being tried: a crash from now on counts against them."""

    def clear(self, seqs: Sequence[int]) -> None:
        """Clear the mark: a crash from now on does not count against them."""

    def read(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, Event | str]]:
        """The content of these, one after the other, or why it cannot be read.

        Ends before a large one that may not be taken.
        """

    def take_large(self) -> bool:
        """Whether this thread may hold a large event now: one thread at a time may."""

    def let_go(self) -> None:
        """The large event is dealt with, or there was none."""

    def give_up(self, unreadable: dict[int, str]) -> list[tuple[int, int]]:
        """Make dead letters of these; return which became some, with their attempts."""

    def accept(self, seqs: Sequence[int]) -> None:
        """These go like those behind them."""

    def published(self, seqs: Sequence[int], suspects: dict[int, str]) -> None:
        """Kafka has these; the suspects of their batch are to be tried alone."""

    def record(self, tried: Sequence[Tried], pauses: Sequence[float]) -> list[tuple[int, str, int]]:
        """Write verdicts; return seq, state and attempts of those that were refused."""


class Prober(Protocol):
    """Tries events alone."""

    @property
    def is_busy(self) -> bool:
        """Whether something is being tried, or its verdicts are not fetched."""

    def is_ready(self, topic: str) -> bool:
        """Whether an event of this topic (empty: of none) can be tried at once."""

    def prepare(self, batch: list[Attempt]) -> None:
        """Make ready for these; only those that cannot be tried now get a verdict."""

    def submit(self, batch: list[Attempt]) -> None:
        """Try these, each of another aggregate; while it is not busy."""

    def verdicts(self) -> list[Tried]:
        """The verdicts since the last call."""

    def innocent(self) -> list[int]:
        """Return the seqs of events that were answered, or are awaited: they do not cause a crash."""


class Counters(Protocol):
    """What is counted."""

    def published(self, events: int) -> None:
        """So many parked events have been published, and their rows deleted."""

    def rejected(self, reasons: Iterable[str]) -> None:
        """Events were refused that were tried alone, each for one of these reasons."""


class Verdict(Enum):
    """The result of an attempt."""

    PUBLISHED = "Kafka has it"
    ACCEPTED = "Kafka would take it: tried in a transaction that was aborted"
    REFUSED = "refused alone: counts"
    UNAVAILABLE = "its topic or its schema is not there: does not count"
    UNKNOWN = "no answer: does not count"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A parked event to be tried."""

    event: Event
    attempts: int
    """How many times it was refused before."""
    is_last: bool
    """Whether a refusal makes it a dead letter."""
    is_replay: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """An attempt and its result."""

    attempt: Attempt
    verdict: Verdict
    reason: str = ""

    def pause(self, retry_seconds: float, jitter: Callable[[], float]) -> float:
        """Return the seconds until the next attempt.

        Args:
            retry_seconds: the pause after the first refusal.
            jitter: returns a factor, so that events refused together are not retried together.
        """
        if self.verdict is Verdict.UNKNOWN:
            return _OUTAGE_SECONDS
        if self.verdict is Verdict.UNAVAILABLE:
            return _TOPIC_SECONDS
        return min(LONGEST_PAUSE, retry_seconds * 2.0**self.attempt.attempts) * jitter()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that is no longer tried."""

    event: Event
    attempts: int
    error: str
