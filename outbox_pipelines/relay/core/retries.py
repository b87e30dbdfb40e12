"""Retries parked events; publishes those waiting behind one that succeeded, or makes dead letters.

Invariants:
- Everything here runs in the thread, and the session, that settles the shard: a relay that lost the shard
  cannot change anything.
- At most one operation per aggregate is in progress: its first event is tried alone, or a run of the events
  behind it is released.
- A verdict is written before anything else is done for the aggregate.
- An event that crashed a relay is tried alone: nothing else is tried or released at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from outbox_pipelines.core.event import LARGE, Event, weigh
from outbox_pipelines.relay.core.batch import ReleasedBatch
from outbox_pipelines.relay.core.blocked import MOMENT_SECONDS, Aggregate, BlockedAggregates
from outbox_pipelines.relay.core.crash_guard import HARMLESS_SECONDS
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.parked import (
    Attempt,
    DeadLetter,
    EventProber,
    ParkedCounters,
    ParkedEvent,
    ParkedRows,
    RetryPolicy,
    TakenOver,
    Tried,
    Verdict,
)
from outbox_pipelines.relay.core.producers import Clock
from outbox_pipelines.relay.core.quarantine import Quarantine

MAX_CRASHES: Final = 3
_AT_ONCE: Final = 500
_RELEASE: Final = 5000
_MOST_RELEASES: Final = 2
_REFRESH_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Run:
    """Events that were released together."""

    released: ReleasedBatch
    marked: list[int]
    """Seqs of the events that a crash would count against."""
    is_alone: bool = False
    """Whether it is one event with crashes: until it is settled, nothing else is tried or released."""
    taken_at: float | None = None
    """When the publishing thread was first seen to have taken it."""


def _always() -> bool:
    return True


class Retries:
    """Retries the parked events of an owned shard.

    Args:
        topic_of: the topic of an event with these types; empty if they do not form a valid name.
        jitter: returns a factor for each pause, so that events refused together are not retried together.
        policy_of: the retry policy of an event with these types.
        batch_bytes: bytes of content that are read at once.
        on_crash: called with an event that was being tried alone when a relay crashed.
        may_isolate: called before an event that crashed a relay is tried; False: not now, ask again.
    """

    def __init__(
        self,
        table: ParkedRows,
        blocked: BlockedAggregates,
        prober: EventProber,
        quarantine: Quarantine,
        *,
        clock: Clock,
        topic_of: Callable[[str, str], str],
        jitter: Callable[[], float],
        policy_of: Callable[[str, str], RetryPolicy],
        batch_bytes: int,
        on_dead_letter: Callable[[DeadLetter], None],
        on_crash: Callable[[TakenOver], None],
        counters: ParkedCounters,
        may_isolate: Callable[[], bool] = _always,
    ) -> None:
        self._table = table
        self._blocked = blocked
        self._prober = prober
        self._quarantine = quarantine
        self._clock = clock
        self._topic_of = topic_of
        self._jitter = jitter
        self._policy_of = policy_of
        self._batch_bytes = batch_bytes
        self._on_dead_letter = on_dead_letter
        self._on_crash = on_crash
        self._counters = counters
        self._may_isolate = may_isolate
        self._has_large = False
        """Whether a large event is being tried or released."""
        self._revision = -1
        self._refresh_at = 0.0
        self._replay_at: float | None = None
        self._in_flight: list[_Run] = []
        """Released runs that are not settled."""
        self.published = 0
        """Number of parked events published since the start."""
        self.released: deque[ReleasedBatch] = deque()
        """Taken by the publishing thread."""

    def begin(self, *, crashed: bool) -> None:
        """Resume the predecessor's unfinished work; to be called before anything is published.

        Args:
            crashed: whether the predecessor ended without returning the shard.
        """
        for taken in self._table.take_over(crashed=crashed):
            if crashed and taken.state == "failed":
                self._on_dead_letter(DeadLetter(taken.event, taken.attempts, taken.error or ""))
            elif taken.is_alone:
                self._on_crash(taken)
        self._refresh(self._clock())

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in progress, and nothing is due now."""
        return (
            self.is_quiet
            and self._quarantine.is_quiet
            and (self._replay_at is None or self._replay_at > self._clock())
            and self._blocked.is_settled
        )

    @property
    def is_quiet(self) -> bool:
        return not (self._in_flight or self._prober.is_busy)

    @property
    def pause(self) -> float:
        if not self.is_quiet:
            return MOMENT_SECONDS
        now = self._clock()
        due = min(self._refresh_at, self._blocked.next_due, self._replay_at or self._refresh_at)
        return max(min(due - now, self._quarantine.pause), 0.001)

    def advance(self, *, may_try: bool) -> None:
        self._record(self._prober.verdicts())
        now = self._clock()
        self._clear_marks(now)
        if now >= self._refresh_at:
            self._refresh(now)
        if not may_try or self._is_occupied:
            return
        self._quarantine.advance()
        if aggregates := self._blocked.due(_AT_ONCE):
            self._attend(aggregates)
        if self._replay_at is not None and self._replay_at <= now and not self._is_occupied:
            self._replay(now)

    def close(self) -> None:
        """Record the last verdicts after the prober has ended: otherwise the successor repeats them."""
        self._record(self._prober.verdicts())

    def settled(self, complete: Complete) -> None:
        published = [event.seq for event in complete.published()]
        self._table.published(published, complete.suspects)
        self._count(len(published))
        self._in_flight = [run for run in self._in_flight if run.released is not complete.batch]
        self._release_large(complete.batch.events)
        for aggregate in {Aggregate(e.aggregate_type, e.aggregate_id) for e in complete.batch.events}:
            self._blocked.schedule(aggregate)

    @property
    def _is_occupied(self) -> bool:
        """Whether an attempt or a run must end before anything else is tried or released."""
        return self._prober.is_busy or any(run.is_alone for run in self._in_flight)

    def _count(self, published: int) -> None:
        self.published += published
        self._counters.published(published)

    def _clear_marks(self, now: float) -> None:
        """Clear the mark of events that are answered or wait for Kafka.

        A kill during an outage counts against no event.
        """
        cleared = self._prober.harmless()
        for run in self._in_flight:
            if not run.marked or any(run.released is queued for queued in list(self.released)):
                continue
            run.taken_at = run.taken_at or now
            if now - run.taken_at >= HARMLESS_SECONDS:
                cleared += run.marked
                run.marked = []
        if cleared:
            self._table.clear(cleared)

    def _refresh(self, now: float) -> None:
        """Load the blocked aggregates from the table at the start and after each replay or discard."""
        revision = self._table.revision()
        self._refresh_at = now + _REFRESH_SECONDS
        if revision != self._revision:
            self._revision = revision
            self._blocked.load(self._table.blocked())
            self._replay_at = now

    def _attend(self, aggregates: list[Aggregate]) -> None:
        heads = {head.aggregate: head for head in self._table.heads(aggregates)}
        attempts: list[ParkedEvent] = []
        alone: list[ParkedEvent] = []
        free: list[Aggregate] = []
        cleared: list[int] = []
        for aggregate in aggregates:
            head = heads.get(aggregate)
            if head is None:
                self._quarantine.forget(aggregate)
                self._blocked.free(aggregate)
            elif not head.is_covered:
                # Parked ahead of the position by a relay that crashed: it blocks until it is read again.
                self._blocked.schedule(aggregate, MOMENT_SECONDS)
            elif head.state not in ("waiting", "retrying"):
                self._blocked.schedule(aggregate, None)
            elif head.crashes and head.due_in > 0:
                # Another event can be the trial for its topic.
                self._quarantine.forget(aggregate)
                self._blocked.schedule(aggregate, head.due_in)
            elif self._quarantine.reason_to_wait(self._topic(head), aggregate) is not None:
                continue
            elif head.crashes:
                alone.append(head)
            elif self._quarantine.is_trial(aggregate):
                attempts.append(head)
            elif head.state == "waiting":
                free.append(aggregate)
            elif self._quarantine.has_cleared(aggregate) and not head.attempts:
                # Its topic was the cause: it is published with the events behind it.
                cleared.append(head.seq)
                free.append(aggregate)
            elif head.due_in > 0:
                self._blocked.schedule(aggregate, head.due_in)
            else:
                attempts.append(head)
        if cleared:
            self._table.accept(cleared)
        if alone:
            for aggregate in [*free, *(head.aggregate for head in attempts)]:
                self._blocked.schedule(aggregate, MOMENT_SECONDS)
            self._isolate(alone)
        else:
            self._try(attempts)
            self._release(free)

    def _isolate(self, heads: list[ParkedEvent]) -> None:
        """Try or release one event that crashed a relay, if nothing else is in progress."""
        must_wait = self._in_flight or not self._may_isolate()
        now, later = ([], heads) if must_wait else (heads[:1], heads[1:])
        for head in later:
            self._blocked.schedule(head.aggregate, MOMENT_SECONDS)
        if now and now[0].state == "waiting":
            self._release([now[0].aggregate], is_alone=True)
        else:
            self._try(now)

    def _topic(self, parked: ParkedEvent) -> str:
        return self._topic_of(parked.event.aggregate_type, parked.event.event_type)

    def _policy(self, event: Event) -> RetryPolicy:
        return self._policy_of(event.aggregate_type, event.event_type)

    def _try(self, parked: list[ParkedEvent]) -> None:
        """Submit these events, which are due; first prepare the prober if it is not ready for all of them."""
        if not parked:
            return
        if unready := [head for head in parked if not self._prober.is_ready(self._topic(head))]:
            self._prober.prepare([self._attempt(head, head.event) for head in unready])
            for head in parked:
                self._postpone(head)
            return
        events, _ = self._read(parked, marked=[head.seq for head in parked])
        attempts = []
        for head in parked:
            if (event := events.get(head.seq)) is not None:
                attempts.append(self._attempt(head, event))
            else:
                self._postpone(head)
        if attempts:
            self._prober.submit(attempts)

    def _attempt(self, parked: ParkedEvent, event: Event) -> Attempt:
        is_replay = parked.state == "replaying"
        is_last = is_replay or parked.attempts + 1 >= self._policy(event).max_attempts
        return Attempt(event, parked.attempts, is_last, is_replay)

    def _postpone(self, parked: ParkedEvent) -> None:
        """Schedule the aggregate of an event again, in a moment."""
        if parked.state == "replaying":
            self._blocked.wake(parked.aggregate)
        else:
            self._blocked.schedule(parked.aggregate, MOMENT_SECONDS)

    def _release(self, aggregates: list[Aggregate], *, is_alone: bool = False) -> None:
        if not aggregates:
            return
        events: dict[int, Event] = {}
        size = 0
        marked: list[int] = []
        if len(self._in_flight) < _MOST_RELEASES:
            most = 1 if is_alone else max(1, _RELEASE // len(aggregates))
            waiting = self._table.behind(aggregates, most)
            marked = _firsts(waiting)
            events, size = self._read(waiting, marked=marked, is_run=True)
        released_aggregates = {(event.aggregate_type, event.aggregate_id) for event in events.values()}
        for aggregate in aggregates:
            if aggregate not in released_aggregates:
                self._blocked.schedule(aggregate, MOMENT_SECONDS)
        if events:
            released = ReleasedBatch(list(events.values()), size)
            self._in_flight.append(_Run(released, [seq for seq in marked if seq in events], is_alone))
            self.released.append(released)

    def _read(
        self, parked: list[ParkedEvent], *, marked: list[int], is_run: bool = False
    ) -> tuple[dict[int, Event], int]:
        """Mark events as being tried, then read as many as fit into a batch.

        An event that cannot be read becomes a dead letter.

        Args:
            marked: the seqs of the events that a crash is to count against.
            is_run: whether events of one aggregate are released together: none is read behind one that cannot
                be read.

        Returns:
            The events by seq, and their size, as `weigh` counts.
        """
        by_seq = {row.seq: row for row in sorted(parked)}
        self._table.mark(marked)
        events: dict[int, Event] = {}
        unreadable: dict[int, str] = {}
        ended: set[Aggregate] = set()
        size = 0
        with closing(self._table.read(list(by_seq), self._may_take_large)) as contents:
            for seq, content in contents:
                aggregate = by_seq[seq].aggregate
                if isinstance(content, str):
                    if aggregate not in ended:
                        unreadable[seq] = content
                    ended.add(aggregate)
                elif not (is_run and aggregate in ended):
                    events[seq] = content
                    weight = weigh([content])
                    self._has_large |= weight > LARGE
                    size += weight
                if size > self._batch_bytes:
                    break
        if not self._has_large:
            self._table.return_large()
        if not_read := [seq for seq in marked if seq not in events]:
            self._table.clear(not_read)
        if unreadable:
            for seq, attempts in self._table.make_dead_letters(unreadable):
                self._on_dead_letter(DeadLetter(by_seq[seq].event, attempts, unreadable[seq]))
        return events, size

    def _may_take_large(self) -> bool:
        return not self._has_large and self._table.take_large()

    def _release_large(self, events: Iterable[Event]) -> None:
        """Let other threads read a large event, if one of these events, which are finished, is large."""
        if self._has_large and any(weigh([event]) > LARGE for event in events):
            self._has_large = False
            self._table.return_large()

    def _replay(self, now: float) -> None:
        due = self._table.replays(_AT_ONCE)
        if crashed := [dead_letter for dead_letter in due if dead_letter.crashes]:
            if not self._in_flight and self._may_isolate():
                self._try(crashed[:1])
        elif due:
            self._try(due)
        else:
            self._replay_at = now + _REFRESH_SECONDS if self._table.has_replays() else None

    def _record(self, results: list[Tried]) -> None:
        """Write verdicts, then schedule the aggregates again."""
        if not results:
            return
        pauses = [
            tried.pause(self._policy(tried.attempt.event).retry_seconds, self._jitter) for tried in results
        ]
        rows = self._table.record(results, pauses)
        self._count(sum(tried.verdict is Verdict.PUBLISHED for tried in results))
        self._counters.rejected(tried.reason for tried in results if tried.verdict is Verdict.REFUSED)
        for tried in results:
            event = tried.attempt.event
            aggregate = Aggregate(event.aggregate_type, event.aggregate_id)
            self._quarantine.judge(aggregate, tried.verdict)
            if tried.attempt.is_replay and tried.verdict is Verdict.ACCEPTED:
                self._blocked.load([aggregate])
            elif tried.attempt.is_replay:
                self._blocked.wake(aggregate)
            else:
                self._blocked.schedule(aggregate)
        self._release_large(tried.attempt.event for tried in results)
        by_seq = {tried.attempt.event.seq: tried for tried in results}
        for seq, state, attempts in rows:
            if state == "failed":
                self._on_dead_letter(DeadLetter(by_seq[seq].attempt.event, attempts, by_seq[seq].reason))


def _firsts(parked: Iterable[ParkedEvent]) -> list[int]:
    """Return the first seq of each aggregate."""
    first: dict[Aggregate, int] = {}
    for row in sorted(parked):
        first.setdefault(row.aggregate, row.seq)
    return list(first.values())
