"""What becomes of parked events: tried alone, released behind one that went, or dead letters.

Invariants:
- Everything here runs in the thread, and the session, that settles the shard: who has lost the shard can
  change nothing.
- Of an aggregate one thing is under way at a time: its first event tried alone, or a run behind it released.
- A verdict is written before anything else is done for the aggregate.
- An event at which a relay has crashed is tried alone: nothing else is tried or released at the same time.
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
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.parked import (
    Attempt,
    Counters,
    DeadLetter,
    ParkedEvent,
    Prober,
    RetryPolicy,
    Table,
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
_NEWS_SECONDS: Final = 1.0
# An event that crashes the process does so when it is encoded, compressed or sent.
_INNOCENT_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Run:
    """Events that were released together."""

    released: ReleasedBatch
    marked: list[int]
    """Seqs of those whose death would be counted."""
    is_alone: bool = False
    """Whether it is one event with crashes: until it is settled, nothing else is tried or released."""
    handed_at: float | None = None
    """When the publishing thread was seen to have taken it."""


def _always() -> bool:
    return True


class Retries:
    """Retries the parked events of an owned shard.

    Args:
        topic_of: where an event with these types goes; empty where they make no name.
        jitter: a factor for each pause, so that what was refused together does not stay together.
        policy_of: how often an event with these types is tried.
        batch_bytes: content that is read at once.
        on_crash: called with an event that was being tried alone when a relay crashed.
        may_isolate: asked before an event that relays have crashed at is tried; if not, it is asked again.
    """

    def __init__(
        self,
        table: Table,
        blocked: BlockedAggregates,
        prober: Prober,
        quarantine: Quarantine,
        *,
        clock: Clock,
        topic_of: Callable[[str, str], str],
        jitter: Callable[[], float],
        policy_of: Callable[[str, str], RetryPolicy],
        batch_bytes: int,
        on_dead_letter: Callable[[DeadLetter], None],
        on_crash: Callable[[TakenOver], None],
        counters: Counters,
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
        self._on_death = on_crash
        self._counters = counters
        self._may_isolate = may_isolate
        self._has_large = False
        """Whether something large is tried or released."""
        self._news = -1
        self._news_at = 0.0
        self._replay_at: float | None = None
        self._in_flight: list[_Run] = []
        """Released runs that are not settled."""
        self.published = 0
        """How many parked events have been published since."""
        self.released: deque[ReleasedBatch] = deque()
        """For the publishing thread to take."""

    def begin(self, *, crashed: bool) -> None:
        """Resume the predecessor's unfinished work; to be called before anything is published.

        Args:
            crashed: whether it ended without giving the shard back.
        """
        for one in self._table.take_over(crashed=crashed):
            if crashed and one.state == "failed":
                self._on_dead_letter(DeadLetter(one.event, one.attempts, one.error or ""))
            elif one.is_alone:
                self._on_death(one)
        self._hear_news(self._clock())

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, and nothing is due now."""
        return (
            self.is_quiet
            and self._quarantine.is_quiet
            and (self._replay_at is None or self._replay_at > self._clock())
            and self._blocked.is_settled
        )

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way."""
        return not (self._in_flight or self._prober.is_busy)

    @property
    def pause(self) -> float:
        """How long until something may want attention, in seconds."""
        if not self.is_quiet:
            return MOMENT_SECONDS
        now = self._clock()
        due = min(self._news_at, self._blocked.next_due, self._replay_at or self._news_at)
        return max(min(due - now, self._quarantine.pause), 0.001)

    def look_after(self, *, may_try: bool) -> None:
        """One round: verdicts, news, what is due.

        Args:
            may_try: whether Kafka takes events.
        """
        self._record(self._prober.verdicts())
        now = self._clock()
        self._clear_the_waiting(now)
        if now >= self._news_at:
            self._hear_news(now)
        if not may_try or self._is_occupied:
            return
        self._quarantine.look()
        if aggregates := self._blocked.due(_AT_ONCE):
            self._attend(aggregates)
        if self._replay_at is not None and self._replay_at <= now and not self._is_occupied:
            self._replay(now)

    def close(self) -> None:
        """Record the last verdicts, once the prober has ended: otherwise the successor repeats them."""
        self._record(self._prober.verdicts())

    def settled(self, complete: Complete) -> None:
        """A released run is complete: what Kafka has is no longer parked."""
        published = [event.seq for event in complete.published()]
        self._table.published(published, complete.suspects)
        self._count(len(published))
        self._in_flight = [run for run in self._in_flight if run.released is not complete.batch]
        self._is_dealt_with(complete.batch.events)
        for aggregate in {Aggregate(e.aggregate_type, e.aggregate_id) for e in complete.batch.events}:
            self._blocked.look_again(aggregate)

    @property
    def _is_occupied(self) -> bool:
        """Whether something must end before anything else is tried or released."""
        return self._prober.is_busy or any(run.is_alone for run in self._in_flight)

    def _count(self, published: int) -> None:
        self.published += published
        self._counters.published(published)

    def _clear_the_waiting(self, now: float) -> None:
        """Takes the mark off what is answered, or waits for Kafka: kills in an outage blame no event."""
        waiting = self._prober.innocent()
        for run in self._in_flight:
            if not run.marked or any(run.released is queued for queued in list(self.released)):
                continue
            run.handed_at = run.handed_at or now
            if now - run.handed_at >= _INNOCENT_SECONDS:
                waiting += run.marked
                run.marked = []
        if waiting:
            self._table.clear(waiting)

    def _hear_news(self, now: float) -> None:
        """At the beginning, and after each replay or discard, load the parked events from the table."""
        news = self._table.news()
        self._news_at = now + _NEWS_SECONDS
        if news != self._news:
            self._news = news
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
                # Parked ahead of the position by a relay that died: it is read again first, and still blocks.
                self._blocked.look_again(aggregate, MOMENT_SECONDS)
            elif head.state not in ("waiting", "retrying"):
                self._blocked.look_again(aggregate, None)
            elif head.crashes and head.due_in > 0:
                # Another one of its topic can be the trial.
                self._quarantine.forget(aggregate)
                self._blocked.look_again(aggregate, head.due_in)
            elif self._quarantine.holds(self._topic(head), aggregate) is not None:
                continue
            elif head.crashes:
                alone.append(head)
            elif self._quarantine.is_trial(aggregate):
                attempts.append(head)
            elif head.state == "waiting":
                free.append(aggregate)
            elif self._quarantine.has_cleared(aggregate) and not head.attempts:
                # Its topic was to blame: it goes like those behind it.
                cleared.append(head.seq)
                free.append(aggregate)
            elif head.due_in > 0:
                self._blocked.look_again(aggregate, head.due_in)
            else:
                attempts.append(head)
        if cleared:
            self._table.accept(cleared)
        if alone:
            for aggregate in [*free, *(head.aggregate for head in attempts)]:
                self._blocked.look_again(aggregate, MOMENT_SECONDS)
            self._isolate(alone)
        else:
            self._try(attempts)
            self._release(free)

    def _isolate(self, heads: list[ParkedEvent]) -> None:
        """Tries or releases one event that a relay has died of, when nothing else is under way."""
        must_wait = self._in_flight or not self._may_isolate()
        now, later = ([], heads) if must_wait else (heads[:1], heads[1:])
        for head in later:
            self._blocked.look_again(head.aggregate, MOMENT_SECONDS)
        if now and now[0].state == "waiting":
            self._release([now[0].aggregate], is_alone=True)
        else:
            self._try(now)

    def _topic(self, parked: ParkedEvent) -> str:
        return self._topic_of(parked.event.aggregate_type, parked.event.event_type)

    def _policy(self, event: Event) -> RetryPolicy:
        return self._policy_of(event.aggregate_type, event.event_type)

    def _try(self, parked: list[ParkedEvent]) -> None:
        """Submits these, all of which are due, as soon as nothing but their content is missing."""
        if not parked:
            return
        if unready := [one for one in parked if not self._prober.is_ready(self._topic(one))]:
            self._prober.prepare([self._attempt(one, one.event) for one in unready])
            for one in parked:
                self._again(one)
            return
        events, _ = self._read(parked, marked=[one.seq for one in parked])
        attempts = []
        for one in parked:
            if (event := events.get(one.seq)) is not None:
                attempts.append(self._attempt(one, event))
            else:
                self._again(one)
        if attempts:
            self._prober.submit(attempts)

    def _attempt(self, parked: ParkedEvent, event: Event) -> Attempt:
        is_replay = parked.state == "replaying"
        is_last = is_replay or parked.attempts + 1 >= self._policy(event).max_attempts
        return Attempt(event, parked.attempts, is_last, is_replay)

    def _again(self, parked: ParkedEvent) -> None:
        """Has the aggregate of an event looked after again in a moment."""
        if parked.state == "replaying":
            self._blocked.wake(parked.aggregate)
        else:
            self._blocked.look_again(parked.aggregate, MOMENT_SECONDS)

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
        found = {(event.aggregate_type, event.aggregate_id) for event in events.values()}
        for aggregate in aggregates:
            if aggregate not in found:
                self._blocked.look_again(aggregate, MOMENT_SECONDS)
        if events:
            released = ReleasedBatch(list(events.values()), size)
            self._in_flight.append(_Run(released, [seq for seq in marked if seq in events], is_alone))
            self.released.append(released)

    def _read(
        self, parked: list[ParkedEvent], *, marked: list[int], is_run: bool = False
    ) -> tuple[dict[int, Event], int]:
        """Marks events as being tried, then reads their content: by seq, as many as fit into a batch.

        What cannot be read becomes a dead letter. Returns the events and their size, as `weigh` counts.

        Args:
            marked: the seqs of those whose death is to be counted.
            is_run: events of one aggregate are released together: none is read behind one that cannot be.
        """
        by_seq = {one.seq: one for one in sorted(parked)}
        self._table.mark(marked)
        events: dict[int, Event] = {}
        unreadable: dict[int, str] = {}
        ended: set[Aggregate] = set()
        size = 0
        with closing(self._table.read(list(by_seq), self._may_take_large)) as found:
            for seq, content in found:
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
            self._table.let_go()
        if left := [seq for seq in marked if seq not in events]:
            self._table.clear(left)
        if unreadable:
            for seq, attempts in self._table.give_up(unreadable):
                self._on_dead_letter(DeadLetter(by_seq[seq].event, attempts, unreadable[seq]))
        return events, size

    def _may_take_large(self) -> bool:
        return not self._has_large and self._table.take_large()

    def _is_dealt_with(self, events: Iterable[Event]) -> None:
        """Lets others read a large event, if it was among these."""
        if self._has_large and any(weigh([event]) > LARGE for event in events):
            self._has_large = False
            self._table.let_go()

    def _replay(self, now: float) -> None:
        due = self._table.replays(_AT_ONCE)
        if deadly := [one for one in due if one.crashes]:
            if not self._in_flight and self._may_isolate():
                self._try(deadly[:1])
        elif due:
            self._try(due)
        else:
            self._replay_at = now + _NEWS_SECONDS if self._table.has_replays() else None

    def _record(self, tried: list[Tried]) -> None:
        """Writes verdicts, then lets the aggregates be looked after again."""
        if not tried:
            return
        pauses = [one.pause(self._policy(one.attempt.event).retry_seconds, self._jitter) for one in tried]
        rows = self._table.record(tried, pauses)
        self._count(sum(one.verdict is Verdict.PUBLISHED for one in tried))
        self._counters.rejected(one.reason for one in tried if one.verdict is Verdict.REFUSED)
        for one in tried:
            event = one.attempt.event
            aggregate = Aggregate(event.aggregate_type, event.aggregate_id)
            self._quarantine.judge(aggregate, one.verdict)
            if one.attempt.is_replay and one.verdict is Verdict.ACCEPTED:
                self._blocked.load([aggregate])
            elif one.attempt.is_replay:
                self._blocked.wake(aggregate)
            else:
                self._blocked.look_again(aggregate)
        self._is_dealt_with(one.attempt.event for one in tried)
        by_seq = {one.attempt.event.seq: one for one in tried}
        for seq, state, attempts in rows:
            if state == "failed":
                self._on_dead_letter(DeadLetter(by_seq[seq].attempt.event, attempts, by_seq[seq].reason))


def _firsts(parked: Iterable[ParkedEvent]) -> list[int]:
    """The first seq of each aggregate."""
    first: dict[Aggregate, int] = {}
    for one in sorted(parked):
        first.setdefault(one.aggregate, one.seq)
    return list(first.values())
