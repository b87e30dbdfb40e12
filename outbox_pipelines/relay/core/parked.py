"""Parked events in the core: rows, attempts, pauses; the protocols of their table and of the prober."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.blocked import Aggregate

LONGEST_PAUSE: Final = 300.0
"""Between two attempts at a parked event, in seconds."""
CRASH_PAUSE: Final = 3.0
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
    """Number of refusals that makes a dead letter."""
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
    """Whether the position covers it: until then it is read again."""

    @property
    def seq(self) -> int:
        return self.event.seq

    @property
    def aggregate(self) -> Aggregate:
        return Aggregate(self.event.aggregate_type, self.event.aggregate_id)


class TakenOver(NamedTuple):
    """An event that was being tried when the previous relay ended, and its current state."""

    event: Event
    was: str
    """Its state at that time."""
    state: str
    attempts: int
    error: str | None
    is_alone: bool
    """Whether nothing else was being tried."""
    crashes: int
    due_in: float


class ParkedRows(Protocol):
    """A shard's parked events, in the session that owns the shard. Each call is one transaction."""

    def take_over(self, *, crashed: bool) -> list[TakenOver]:
        """Update the events that were being tried when the previous relay ended; return them."""

    def revision(self) -> int:
        """Return a number that changes with each replay or discard."""

    def blocked(self) -> Iterable[tuple[str, str]]:
        """Return all aggregates that have parked events."""

    def heads(self, aggregates: Sequence[Aggregate]) -> list[ParkedEvent]:
        """Return the first event of each aggregate that blocks it; none for a free aggregate."""

    def behind(self, aggregates: Sequence[Aggregate], limit: int) -> list[ParkedEvent]:
        """Return for each the events that may be released: up to the next that must be tried alone."""

    def replays(self, limit: int) -> list[ParkedEvent]:
        """Return dead letters to be tried again: of each aggregate the first that is due."""

    def has_replays(self) -> bool:
        """Return whether there are dead letters to be tried again, due or not."""

    def mark(self, seqs: Sequence[int]) -> None:
        """Mark these as being tried: a crash from now on counts against them."""

    def clear(self, seqs: Sequence[int]) -> None:
        """Clear the mark: a crash from now on does not count against them."""

    def read(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, Event | str]]:
        """Yield the content of these, one after the other, or the reason why it cannot be read.

        Ends before a large event for which `may_take_large` returns False.
        """

    def take_large(self) -> bool:
        """Return whether this thread may keep a large event in memory now: one thread at a time may."""

    def return_large(self) -> None:
        """Return that right: the large event is finished, or there was none."""

    def make_dead_letters(self, unreadable: dict[int, str]) -> list[tuple[int, int]]:
        """Make dead letters of these, with the reasons; return those that became one, with their attempts."""

    def accept(self, seqs: Sequence[int]) -> None:
        """Let these be released like the events behind them."""

    def published(self, seqs: Sequence[int], suspects: dict[int, str]) -> None:
        """Record these as published, and the suspects of their batch to be tried alone."""

    def record(self, results: Sequence[Tried], pauses: Sequence[float]) -> list[tuple[int, str, int]]:
        """Write verdicts; return seq, state and attempts of those that were refused."""


class EventProber(Protocol):
    """Tries events alone."""

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being tried, or its verdicts are not fetched."""

    def is_ready(self, topic: str) -> bool:
        """Return whether an event of this topic can be tried immediately; call it only while not busy.

        Args:
            topic: empty if the event's types form no valid name: the event is refused before it is sent.
        """

    def prepare(self, batch: list[Attempt]) -> None:
        """Prepare for these events, whose content is not read yet; call it only while it is not busy.

        Only those that cannot be tried now get a verdict: `UNAVAILABLE` or `UNKNOWN`.
        """

    def submit(self, batch: list[Attempt]) -> None:
        """Try these events, each of another aggregate; call it only while it is not busy."""

    def verdicts(self) -> list[Tried]:
        """Return the verdicts since the last call."""

    def harmless(self) -> list[int]:
        """Return the seqs of events that do not crash the process: answered, or unanswered for a second."""


class ParkedCounters(Protocol):
    """Counts results of parked events."""

    def published(self, events: int) -> None:
        """Count parked events that have been published."""

    def rejected(self, reasons: Iterable[str]) -> None:
        """Count events that were refused when tried alone, by reason."""


class Verdict(Enum):
    """The result of an attempt."""

    PUBLISHED = "published"
    ACCEPTED = "Kafka would accept it: tried in a transaction that was aborted"
    REFUSED = "refused alone: counts"
    UNAVAILABLE = "its topic or its schema does not exist: does not count"
    UNKNOWN = "no answer: does not count"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A parked event to be tried."""

    event: Event
    attempts: int
    """Number of earlier refusals."""
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
