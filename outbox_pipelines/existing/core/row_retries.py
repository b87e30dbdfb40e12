"""Retries events of a marked table that Kafka refused: each is tried alone, counted, or made a dead letter.

Invariants:
- Everything here runs in the thread that claims and marks, and writes in the session that owns the table.
- Rows of a blocked aggregate are not claimed. The aggregate is retried and freed only after every claim is
  settled that was made before it was known to be blocked. So none of its rows is in flight when another row
  is published.
- Only the first event of a blocked aggregate is tried, and only if its row can be marked. A verdict is
  written before anything else is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from outbox_pipelines.core.event import Event, weigh
from outbox_pipelines.existing.core.claims import Claims, MarkError, Name
from outbox_pipelines.relay.core.blocked import MOMENT_SECONDS, Aggregate, BlockedAggregates
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.parked import Attempt, DeadLetter, EventProber, Tried, Verdict
from outbox_pipelines.relay.core.producers import Clock
from outbox_pipelines.relay.core.quarantine import Quarantine

_AT_ONCE: Final = 500
# With OUTBOX_ON_DEAD_LETTER=block: seconds between two checks whether the row has been changed.
_CORRECTED_SECONDS: Final = 2.0


class Pending(NamedTuple):
    """A row that was refused before."""

    aggregate: Name
    seq: int
    attempts: int
    due_in: float
    """Seconds until its next attempt; 0 or less if it is due."""


class Refusals(Protocol):
    """Refusals recorded in the rows, in the session that owns the table. Each call is one transaction."""

    remembers_failures: bool
    """Whether a row can record that its event is a dead letter."""

    def tried(self) -> Iterable[Pending]:
        """Return the first row of each aggregate that was refused before."""

    def failed(self) -> Iterable[Name]:
        """Return the aggregates that have dead letters."""

    def still_failed(self, aggregates: Sequence[Name]) -> Collection[Name]:
        """Return those of these aggregates that still have dead letters."""

    def read(self, seqs: Sequence[int]) -> Generator[tuple[int, tuple[Event, int] | str]]:
        """Yield those of these rows that are still pending, with attempts, or why a row cannot be read."""

    def postpone(self, reasons: dict[int, str]) -> None:
        """Write the reason why these wait; count no attempt."""

    def bury(self, reasons: dict[int, str]) -> None:
        """Make dead letters of these, which cannot be read."""

    def rehearse(self, seqs: list[int]) -> None:
        """Mark these, and roll the mark back.

        Raises:
            MarkError: the table does not allow them to be marked.
        """

    def mark_what_can_be(self, seqs: list[int]) -> None:
        """Mark those of these rows that can be marked."""

    def record(self, tried: Sequence[Tried], pauses: Sequence[float], news: Collection[int]) -> None:
        """Write verdicts: marks, refusals, and for the seqs in `news` the reason why they wait.

        Raises:
            MarkError: the table does not allow it to be written.
        """


@dataclass(slots=True)
class _Trial:
    """The first event of a blocked aggregate."""

    seq: int
    is_suspect: bool
    """Whether it was refused; otherwise it only precedes a refused event."""
    attempts: int = 0
    due: float = 0.0
    error: str = ""
    """The reason, as written into its row."""


class RowRetries:
    """Retries the blocked aggregates of an owned table.

    Args:
        topic_of: the topic of an event with these types; empty if they do not form a valid name.
        jitter: returns a factor for each pause, so that events refused together are not retried together.
        most_attempts: number of refusals that makes a dead letter.
        retry_seconds: the first pause.
        batch_bytes: bytes of content that are read at once.
        blocks: whether an aggregate waits for its dead letter.
    """

    def __init__(
        self,
        rows: Refusals,
        claims: Claims,
        blocked: BlockedAggregates,
        prober: EventProber,
        quarantine: Quarantine,
        *,
        clock: Clock,
        topic_of: Callable[[str, str], str],
        jitter: Callable[[], float],
        most_attempts: int,
        retry_seconds: float,
        batch_bytes: int,
        blocks: bool,
        on_dead_letter: Callable[[DeadLetter], None],
    ) -> None:
        self._rows = rows
        self._claims = claims
        self._blocked = blocked
        self._prober = prober
        self._quarantine = quarantine
        self._clock = clock
        self._topic_of = topic_of
        self._jitter = jitter
        self._most_attempts = most_attempts
        self._retry_seconds = retry_seconds
        self._batch_bytes = batch_bytes
        self._blocks = blocks
        self._on_dead_letter = on_dead_letter
        self._trials: dict[Name, _Trial] = {}
        self._ended: dict[Name, int | None] = {}
        """Aggregates that a dead letter blocks, with its `seq` if only this process knows of it."""
        self._put_back: deque[tuple[int, list[Event]]] = deque()
        """Rows that are pending again, with the last claim that may have other rows of their aggregates."""
        self.published = 0
        """How many refused events have been published since the start."""
        self.dead = 0
        """How many became dead letters."""

    def begin(self) -> None:
        """Take over what the predecessor left; call it before anything is claimed."""
        now = self._clock()
        for aggregate, seq, attempts, due_in in self._rows.tried():
            self._trials[aggregate] = _Trial(seq, True, attempts, now + max(0.0, due_in))
        if self._blocks:
            for aggregate in self._rows.failed():
                self._ended[aggregate] = None
                self._trials.pop(aggregate, None)
        self._blocked.load([*self._trials, *self._ended])

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in progress, and nothing is due now."""
        is_quiet = self._quarantine.is_quiet and not (self._prober.is_busy or self._put_back)
        return is_quiet and self._blocked.is_settled

    @property
    def pause(self) -> float:
        """Seconds until the next retry or check may be due."""
        if self._prober.is_busy:
            return MOMENT_SECONDS
        return min(self._quarantine.pause, max(self._blocked.next_due - self._clock(), 0.001))

    def settled(self, complete: Complete) -> None:
        """Take over the parked events of a settled claim: their rows are pending again."""
        held = sorted(complete.parked_events())
        self._bury(complete.dead)
        for event in held:
            if event.seq in complete.dead:
                continue
            aggregate = (event.aggregate_type, event.aggregate_id)
            trial = self._trials.get(aggregate)
            if aggregate not in self._ended and (trial is None or event.seq < trial.seq):
                self._trials[aggregate] = _Trial(event.seq, event.seq in complete.suspects)
        if held:
            self._put_back.append((self._claims.claimed, held))

    def _bury(self, dead: Mapping[int, tuple[Event, str]]) -> None:
        """Record dead letters that could not be read."""
        if not dead:
            return
        self._rows.bury({seq: reason for seq, (_, reason) in dead.items()})
        for event, reason in dead.values():
            self._give_up(DeadLetter(event, 0, reason))

    def _give_up(self, letter: DeadLetter) -> None:
        self.dead += 1
        event = letter.event
        known_here = None if self._rows.remembers_failures else event.seq
        if known_here is not None:
            self._claims.passed_over.add(known_here)
        if self._blocks:
            self._ended[event.aggregate_type, event.aggregate_id] = known_here
        self._on_dead_letter(letter)

    def advance(self, *, may_try: bool) -> None:
        """Do one round: record verdicts, retry rows that are pending again, try what is due.

        Args:
            may_try: whether Kafka accepts events.
        """
        self._record(self._prober.verdicts())
        in_flight = self._claims.in_flight
        while self._put_back and not (in_flight and in_flight[0].number <= self._put_back[0][0]):
            self._blocked.parked(self._put_back.popleft()[1])
        if not may_try or self._prober.is_busy:
            return
        self._quarantine.advance()
        if aggregates := self._blocked.due(_AT_ONCE):
            self._attend(aggregates)

    def close(self) -> None:
        """Record the last verdicts after the prober has ended: otherwise the successor repeats the events."""
        self._record(self._prober.verdicts())

    def _attend(self, aggregates: list[Aggregate]) -> None:
        now = self._clock()
        due: dict[int, Name] = {}
        ended: list[Name] = []
        for aggregate in aggregates:
            trial = self._trials.get(aggregate)
            if aggregate in self._ended:
                ended.append(aggregate)
            elif trial is None or not trial.is_suspect:
                # Rows before a refused event are claimed together with it, as usual.
                self._free(aggregate)
            elif trial.due > now:
                self._blocked.schedule(aggregate, trial.due - now)
            else:
                due[trial.seq] = aggregate
        if ended:
            self._attend_ended(ended)
        if due:
            self._try(due)

    def _try(self, due: dict[int, Name]) -> None:
        # Read again: the rows may have been changed, marked or deleted.
        attempts: list[Attempt] = []
        held: dict[int, str] = {}
        size = 0
        with closing(self._rows.read(sorted(due))) as found:
            for seq, row in found:
                if isinstance(row, str):
                    # The next claim of the row finds the same problem and makes it a dead letter.
                    continue
                if size > self._batch_bytes:
                    self._blocked.schedule(due.pop(seq), MOMENT_SECONDS)
                    continue
                event, counted = row
                size += weigh([event])
                aggregate = (event.aggregate_type, event.aggregate_id)
                if aggregate != due[seq]:
                    continue
                del due[seq]
                trial = self._trials[aggregate]
                trial.attempts = max(trial.attempts, counted)
                reason = self._quarantine.reason_to_wait(
                    self._topic_of(event.aggregate_type, event.event_type), aggregate
                )
                if reason is not None:
                    # Written only once: each change rewrites the row.
                    if reason and trial.error != reason:
                        trial.error = held[seq] = reason
                elif self._quarantine.has_cleared(aggregate) and not trial.attempts:
                    # Its topic was the cause: it is claimed as usual.
                    self._free(aggregate)
                else:
                    is_last = trial.attempts + 1 >= self._most_attempts
                    attempts.append(Attempt(event, trial.attempts, is_last=is_last, is_replay=False))
        if held:
            self._rows.postpone(held)
        for aggregate in due.values():
            self._free(aggregate)
        if attempts:
            # Every relay that starts would publish a row again that cannot be marked.
            self._rows.rehearse([attempt.event.seq for attempt in attempts])
            self._prober.submit(attempts)

    def _attend_ended(self, aggregates: list[Name]) -> None:
        """Free aggregates whose dead letter is no longer in the table."""
        failed = self._rows.still_failed(aggregates)
        for aggregate in aggregates:
            if aggregate in failed or self._ended[aggregate] is not None:
                self._blocked.schedule(aggregate, _CORRECTED_SECONDS)
            else:
                del self._ended[aggregate]
                self._free(aggregate)

    def _free(self, aggregate: Name) -> None:
        self._trials.pop(aggregate, None)
        self._quarantine.forget(aggregate)
        self._blocked.free(aggregate)

    def _record(self, tried: list[Tried]) -> None:
        """Write verdicts, then schedule the aggregates again."""
        if not tried:
            return
        pauses = [one.pause(self._retry_seconds, self._jitter) for one in tried]
        # A topic that is missing for hours is recorded only once: each change rewrites the row.
        news = {
            one.attempt.event.seq
            for one in tried
            if one.verdict is Verdict.UNAVAILABLE and self._trials[_of(one)].error != one.reason
        }
        try:
            self._rows.record(tried, pauses, news)
        except MarkError:
            published = [one.attempt.event.seq for one in tried if one.verdict is Verdict.PUBLISHED]
            self._rows.mark_what_can_be(published)
            raise
        for one, pause in zip(tried, pauses, strict=True):
            self._go_on(one, pause)

    def _go_on(self, tried: Tried, pause: float) -> None:
        """Apply a written verdict to its aggregate."""
        event, aggregate = tried.attempt.event, _of(tried)
        trial = self._trials[aggregate]
        self._quarantine.judge(aggregate, tried.verdict)
        is_dead = tried.verdict is Verdict.REFUSED and tried.attempt.is_last
        if is_dead:
            self._give_up(DeadLetter(event, tried.attempt.attempts + 1, tried.reason))
        self.published += tried.verdict is Verdict.PUBLISHED
        if is_dead or tried.verdict is Verdict.PUBLISHED:
            del self._trials[aggregate]
            self._blocked.schedule(aggregate)
            return
        trial.attempts += tried.verdict is Verdict.REFUSED
        trial.due = self._clock() + pause
        if tried.verdict is not Verdict.UNKNOWN:
            trial.error = tried.reason
        self._blocked.schedule(aggregate, pause)


def _of(tried: Tried) -> Name:
    event = tried.attempt.event
    return event.aggregate_type, event.aggregate_id
