"""What becomes of parked events: tried alone, released behind one that went, or dead letters.

Invariants:
- Everything here runs in the thread, and the session, that settles the shard: who has lost the shard can
  change nothing.
- Of an aggregate one thing is under way at a time: its first event tried alone, or a run behind it released.
- A verdict is written before anything else is done for the aggregate.
- An event is marked from before its content is read until Kafka has answered, or its client has had it for a
  second. An event with deaths is tried while nothing else is marked. If the relay dies then, the next attempt
  comes after a pause, which grows; the third death makes a dead letter.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from outbox_pipelines.event import LARGE, Event, Released, weigh
from outbox_pipelines.relay import parked_queries
from outbox_pipelines.relay.dead_letter_runs import DeadLetterRuns, describe
from outbox_pipelines.relay.delivery import Complete
from outbox_pipelines.relay.memory import LargeEvent
from outbox_pipelines.relay.metrics import Metrics
from outbox_pipelines.relay.parking import (
    DEATH_PAUSE,
    DIED,
    LONGEST_PAUSE,
    MOMENT_SECONDS,
    Aggregate,
    ParkingLot,
)
from outbox_pipelines.relay.prober import Attempt, Prober, Tried, Verdict
from outbox_pipelines.relay.quarantine import Quarantine
from outbox_pipelines.relay.routing import IllegalTopicError, Router
from outbox_pipelines.relay.shards import Shard, ShardLostError
from outbox_pipelines.relay.topics import Topics
from outbox_pipelines.relay.transactions import place
from outbox_pipelines.settings import Settings

DEATHS: Final = 3
_AT_ONCE: Final = 500
_RELEASE: Final = 5000
_MOST_RELEASES: Final = 2
# A topic that is missing, or a Kafka that is away, is asked again after so long.
_TOPIC_SECONDS: Final = 10.0
_OUTAGE_SECONDS: Final = 1.0
_NEWS_SECONDS: Final = 1.0
# Dead letters in the queue for the operator's command; all others wait in the table.
_MOST_COMMANDS: Final = 16
# An event that kills does so when it is encoded, compressed or sent.
_INNOCENT_SECONDS: Final = 1.0
_LOG: Final = logging.getLogger(__name__)
# The columns of `Event` come first in every row.
_EVENT: Final = len(Event._fields)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that was given up."""

    event: Event
    attempts: int
    error: str


@dataclass(slots=True)
class _Run:
    """Events that were released together."""

    released: Released
    marked: list[int]
    """Seqs of those whose death would be counted."""
    is_alone: bool = False
    """Whether it is one event with deaths: until it is settled, nothing else is tried or released."""
    handed_at: float | None = None
    """When the publishing thread was seen to have taken it."""


class Retries:
    """Looks after the parked events of a shard that has been taken."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        lot: ParkingLot,
        large: threading.Lock,
        *,
        topics: Topics,
        on_dead_letter: Callable[[DeadLetter], None],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._shard = shard
        self._lot = lot
        self._large = LargeEvent(large)
        self._has_large = False
        """Whether something large is tried or released."""
        rehearses = settings.delivery == "exactly_once"
        name = f"{place(settings, shard).transactional_id}-prober" if rehearses else None
        self._prober = Prober(settings, topics, name)
        self._router = Router(settings)
        self._quarantine = Quarantine(topics, lot)
        self._on_dead_letter = on_dead_letter
        self._commands = DeadLetterRuns(settings.dead_letter_command.reveal(), most=_MOST_COMMANDS)
        self._commands_at = 0.0
        self._metrics = metrics
        self._news = -1
        self._news_at = 0.0
        self._replay_at: float | None = None
        self._flying: dict[int, _Run] = {}
        """Released runs that are not settled, by `id` of each."""
        self._blocking = ["waiting", "retrying"]
        if settings.on_dead_letter == "block":
            self._blocking += ["failed", "replaying"]
        self.published = 0
        """How many parked events have been published since."""
        self.released: deque[Released] = deque()
        """For the publishing thread to take."""

    def begin(self, *, died: bool) -> None:
        """Takes up what the predecessor left; to be called before anything is published.

        Args:
            died: whether it ended without giving the shard back.
        """
        with self._shard.transaction():
            pauses = {"pause": DEATH_PAUSE * self._settings.retry_seconds, "longest": LONGEST_PAUSE}
            rows = self._shard.execute(
                parked_queries.WAS_TRYING, {"died": died, "most": DEATHS, "error": DIED} | pauses
            )
            if died and (runs := [row for row in rows if row[_EVENT] == "waiting" and not row[_EVENT + 4]]):
                names = _names((row[2], row[3]) for row in runs)
                self._shard.execute(parked_queries.ALONE, names | {"error": DIED})
        for row in rows:
            event = Event._make(row[:_EVENT])
            _, state, attempts, why, is_alone, deaths, pause = row[_EVENT:]
            if died and state == "failed":
                self._on_dead_letter(DeadLetter(event, attempts, why))
            elif is_alone:
                _LOG.warning(
                    "the relay died while it was trying %s alone (%d of %d): it is tried again in %.0f s",
                    *(event, deaths, DEATHS, pause),
                )
        self._hear_news(time.monotonic())

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, and nothing is due now."""
        return (
            self.is_quiet
            and self._quarantine.is_quiet
            and (self._replay_at is None or self._replay_at > time.monotonic())
            and self._lot.is_settled
        )

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way."""
        return not (self._flying or self._prober.is_busy)

    @property
    def pause(self) -> float:
        """How long until something may want attention, in seconds."""
        if not self.is_quiet:
            return MOMENT_SECONDS
        due = min(self._news_at, self._lot.next_due, self._replay_at or self._news_at)
        due = min(due, time.monotonic() + self._quarantine.pause)
        return max(due - time.monotonic(), 0.001)

    def look_after(self, *, may_try: bool) -> None:
        """One round: verdicts, news, what is due.

        Args:
            may_try: whether Kafka takes events.
        """
        self._record(self._prober.verdicts())
        now = time.monotonic()
        self._run_commands(now)
        self._clear_the_waiting(now)
        if now >= self._news_at:
            self._hear_news(now)
        if not may_try or self._is_occupied:
            return
        self._quarantine.look()
        if aggregates := self._lot.due(_AT_ONCE):
            self._attend(aggregates)
        if self._replay_at is not None and self._replay_at <= now and not self._is_occupied:
            self._replay(now)

    def settled(self, complete: Complete) -> None:
        """A released run is complete: what Kafka has is no longer parked."""
        aggregates = {(event.aggregate_type, event.aggregate_id) for event in complete.piece.events}
        with self._shard.transaction():
            published = [event.seq for event in complete.published()]
            self._shard.execute(parked_queries.RELEASED, {"seqs": published})
            if complete.suspects:
                errors = [why for _, why in complete.suspects.values()]
                self._shard.execute(
                    parked_queries.SUSPECTED, {"seqs": list(complete.suspects), "errors": errors}
                )
        self._shard.count(len(published))
        self.published += len(published)
        self._metrics.published(len(published))
        del self._flying[id(complete.piece)]
        self._is_dealt_with(complete.piece.events)
        for aggregate in aggregates:
            self._lot.look_again(aggregate)

    def held(self) -> tuple[int, int, float]:
        """Return how many events of the shard are parked or dead letters that nobody has dealt with.

        And how many of them wait since a relay died while they were published, the first for so many seconds.
        """
        ((held, paused, due_in),) = self._shard.execute(parked_queries.HELD, {})
        return int(held), int(paused), float(due_in)

    def close(self, *, command_seconds: float) -> None:
        """Stops trying; what is under way is tried again by whoever comes next.

        Args:
            command_seconds: how long to wait for the operator's commands; those left run later.
        """
        self._prober.close()
        # Where the session has gone, they run again.
        with suppress(ShardLostError, psycopg.Error):
            deadline = time.monotonic() + command_seconds
            self._run_commands(math.inf)
            while not self._commands.wait(MOMENT_SECONDS) and time.monotonic() < deadline:
                # A sign of life, too.
                self._shard.execute(parked_queries.COMMANDS_RAN, {"seqs": self._commands.done()})
                self._run_commands(math.inf)
        self._commands.close()
        with suppress(ShardLostError, psycopg.Error):
            self._run_commands(-math.inf)

    @property
    def _is_occupied(self) -> bool:
        """Whether something must end before anything else is tried or released."""
        return self._prober.is_busy or any(run.is_alone for run in self._flying.values())

    def _run_commands(self, now: float) -> None:
        """Has the operator's command run for dead letters, as many as there is room for."""
        if not self._settings.dead_letter_command:
            return
        if ran := self._commands.done():
            self._shard.execute(parked_queries.COMMANDS_RAN, {"seqs": ran})
            self._commands_at = 0.0
        room = self._commands.room
        if now < self._commands_at or not room:
            return
        self._commands_at = now + _NEWS_SECONDS
        found = {"room": room, "under_way": self._commands.under_way()}
        for row in self._shard.execute(parked_queries.COMMANDS, found):
            *columns, attempts, error = row
            event = Event._make([*columns, "", None])
            remedy = f"outbox dead-letters show {event.id}"
            self._commands.submit(event.seq, describe(event, attempts, error, remedy=remedy))

    def _clear_the_waiting(self, now: float) -> None:
        """Takes the mark off what is answered, or waits for Kafka: kills in an outage blame no event."""
        waiting = self._prober.innocent()
        for run in self._flying.values():
            if not run.marked or any(run.released is queued for queued in list(self.released)):
                continue
            run.handed_at = run.handed_at or now
            if now - run.handed_at >= _INNOCENT_SECONDS:
                waiting += run.marked
                run.marked = []
        if waiting:
            self._shard.execute(parked_queries.INNOCENT, {"seqs": waiting})

    def _hear_news(self, now: float) -> None:
        """After somebody has replayed or discarded, and at the beginning: what is parked, from the table."""
        ((news,),) = self._shard.execute(parked_queries.NEWS, {})
        self._news_at = now + _NEWS_SECONDS
        if news != self._news:
            self._news = news
            self._lot.load(self._shard.execute(parked_queries.BLOCKED, {"blocking": self._blocking}))
            self._replay_at = now

    def _attend(self, aggregates: list[Aggregate]) -> None:
        rows = self._shard.execute(parked_queries.HEADS, _names(aggregates) | {"blocking": self._blocking})
        heads = {(row[2], row[3]): row for row in rows}
        attempts, free, cleared, alone = [], [], [], []
        for aggregate in aggregates:
            head = heads.get(aggregate)
            if head is None:
                self._quarantine.forget(aggregate)
                self._lot.free(aggregate)
                continue
            state, tried, due_in, deaths, covered = head[_EVENT:]
            if not covered:
                # Parked ahead of the position by a relay that died: it is read again first, and still blocks.
                self._lot.look_again(aggregate, MOMENT_SECONDS)
            elif state not in ("waiting", "retrying"):
                self._lot.look_again(aggregate, None)
            elif deaths and due_in > 0:
                # Another one of its topic can be the trial.
                self._quarantine.forget(aggregate)
                self._lot.look_again(aggregate, due_in)
            elif self._quarantine.holds(self._topic(head), aggregate) is not None:
                continue
            elif deaths:
                alone.append(head)
            elif self._quarantine.is_trial(aggregate):
                attempts.append(head)
            elif state == "waiting":
                free.append(aggregate)
            elif self._quarantine.has_cleared(aggregate) and not tried:
                # Its topic was to blame: it goes like those behind it.
                cleared.append(head[0])
                free.append(aggregate)
            elif due_in > 0:
                self._lot.look_again(aggregate, due_in)
            else:
                attempts.append(head)
        if cleared:
            self._shard.execute(parked_queries.ACCEPTED, {"seqs": cleared})
        if alone:
            for aggregate in [*free, *map(_aggregate, attempts)]:
                self._lot.look_again(aggregate, MOMENT_SECONDS)
            self._isolate(alone)
        else:
            self._try(attempts)
            self._release(free)

    def _isolate(self, rows: list[tuple[Any, ...]]) -> None:
        """Tries or releases one event that a relay has died of, when nothing else is under way."""
        now, later = ([], rows) if self._flying else (rows[:1], rows[1:])
        for row in later:
            self._lot.look_again(_aggregate(row), MOMENT_SECONDS)
        if now and now[0][_EVENT] == "waiting":
            self._release([_aggregate(now[0])], is_alone=True)
        else:
            self._try(now)

    def _topic(self, row: tuple[Any, ...]) -> str:
        """Of a parked event; empty where its types make no name."""
        try:
            return self._router.topic(row[2], row[4])
        except IllegalTopicError:
            return ""

    def _try(self, rows: list[tuple[Any, ...]]) -> None:
        """Submits these, all of which are due, as soon as nothing but their content is missing."""
        if not rows:
            return
        if unready := [row for row in rows if not self._prober.is_ready(self._topic(row))]:
            self._prober.prepare([_without_content(row) for row in unready])
            for row in rows:
                self._again(row)
            return
        by_seq = {row[0]: row for row in rows}
        events, _ = self._read(by_seq)
        most = self._settings.max_attempts
        attempts = []
        for seq, row in by_seq.items():
            state, count = row[_EVENT : _EVENT + 2]
            if seq in events:
                is_last = state == "replaying" or count + 1 >= most
                attempts.append(Attempt(events[seq], count, is_last, is_replay=state == "replaying"))
            else:
                self._again(row)
        if attempts:
            self._prober.submit(attempts)

    def _again(self, row: tuple[Any, ...]) -> None:
        """Has the aggregate of an event looked after again in a moment."""
        if row[_EVENT] == "replaying":
            self._lot.wake(_aggregate(row))
        else:
            self._lot.look_again(_aggregate(row), MOMENT_SECONDS)

    def _release(self, aggregates: list[Aggregate], *, is_alone: bool = False) -> None:
        if not aggregates:
            return
        events: dict[int, Event] = {}
        size = 0
        if len(self._flying) < _MOST_RELEASES:
            most = 1 if is_alone else max(1, _RELEASE // len(aggregates))
            limit = {"limit": most, "blocking": self._blocking}
            rows = self._shard.execute(parked_queries.FREE, _names(aggregates) | limit)
            events, size = self._read({row[0]: row for row in rows}, is_run=True)
        found = {(event.aggregate_type, event.aggregate_id) for event in events.values()}
        for aggregate in aggregates:
            if aggregate not in found:
                self._lot.look_again(aggregate, MOMENT_SECONDS)
        if events:
            released = Released(list(events.values()), size)
            self._flying[id(released)] = _Run(released, _firsts(events), is_alone)
            self.released.append(released)

    def _read(
        self, rows: dict[int, tuple[Any, ...]], *, is_run: bool = False
    ) -> tuple[dict[int, Event], int]:
        """Marks events as being tried, then reads their content: by seq, as many as fit into a piece.

        What cannot be read becomes a dead letter. Returns the events and their size, as `weigh` counts.

        Args:
            rows: by seq, the names of each.
            is_run: events of one aggregate are released together: the first of each is marked, and none of
                them is read behind one that cannot be.
        """
        rows = dict(sorted(rows.items()))
        marked = _firsts(rows) if is_run else list(rows)
        self._shard.execute(parked_queries.TRYING, {"seqs": marked})
        events: dict[int, Event] = {}
        unreadable: dict[int, str] = {}
        ended: set[tuple[str, str]] = set()
        size = 0
        with closing(self._shard.read_parked(list(rows), self._may_take_large)) as found:
            for seq, content in found:
                aggregate = rows[seq][2:4]
                if isinstance(content, str):
                    if aggregate not in ended:
                        unreadable[seq] = content
                    ended.add(aggregate)
                elif not (is_run and aggregate in ended):
                    events[seq] = Event._make(content)
                    weight = weigh([events[seq]])
                    self._has_large |= weight > LARGE
                    size += weight
                if size > self._settings.piece_bytes:
                    break
        if not self._has_large:
            self._large.give_back()
        if left := [seq for seq in marked if seq not in events]:
            self._shard.execute(parked_queries.INNOCENT, {"seqs": left})
        if unreadable:
            given = {"seqs": list(unreadable), "errors": list(unreadable.values())}
            for seq, attempts in self._shard.execute(parked_queries.UNREADABLE, given):
                event = Event._make(rows[seq][:_EVENT])
                self._on_dead_letter(DeadLetter(event, attempts, unreadable[seq]))
        return events, size

    def _may_take_large(self) -> bool:
        return not self._has_large and self._large.take()

    def _is_dealt_with(self, events: Iterable[Event]) -> None:
        """Lets others read a large event, if it was among these."""
        if self._has_large and any(weigh([event]) > LARGE for event in events):
            self._has_large = False
            self._large.give_back()

    def _replay(self, now: float) -> None:
        rows = self._shard.execute(parked_queries.REPLAYS, {"limit": _AT_ONCE})
        if deadly := [row for row in rows if row[_EVENT + 3]]:
            if not self._flying:
                self._try(deadly[:1])
        elif rows:
            self._try(rows)
        else:
            ((some,),) = self._shard.execute(parked_queries.ANY_REPLAYS, {})
            self._replay_at = now + _NEWS_SECONDS if some else None

    def _record(self, tried: list[Tried]) -> None:
        """Writes verdicts, then lets the aggregates be looked after again."""
        if not tried:
            return
        published = [t.attempt.event.seq for t in tried if t.verdict is Verdict.PUBLISHED]
        refused = [t for t in tried if t.verdict is Verdict.REFUSED]
        postponed = [t for t in tried if t.verdict in (Verdict.UNAVAILABLE, Verdict.UNKNOWN)]
        accepted = [t.attempt.event for t in tried if t.verdict is Verdict.ACCEPTED]
        with self._shard.transaction():
            self._shard.execute(parked_queries.RELEASED, {"seqs": published})
            self._shard.execute(parked_queries.ACCEPTED, {"seqs": [event.seq for event in accepted]})
            rows = self._shard.execute(
                parked_queries.REFUSED, self._columns(refused) | {"most": self._settings.max_attempts}
            )
            self._shard.execute(parked_queries.POSTPONED, self._columns(postponed))
        self._shard.count(len(published))
        self.published += len(published)
        self._metrics.published(len(published))
        self._metrics.rejected(one.reason for one in refused)
        for one in tried:
            event = one.attempt.event
            aggregate = (event.aggregate_type, event.aggregate_id)
            self._quarantine.judge(aggregate, one.verdict)
            if one.attempt.is_replay and one.verdict is Verdict.ACCEPTED:
                self._lot.load([aggregate])
            elif one.attempt.is_replay:
                self._lot.wake(aggregate)
            else:
                self._lot.look_again(aggregate)
        self._is_dealt_with(one.attempt.event for one in tried)
        events = {t.attempt.event.seq: t for t in refused}
        for seq, state, attempts in rows:
            if state == "failed":
                self._on_dead_letter(DeadLetter(events[seq].attempt.event, attempts, events[seq].reason))

    def _columns(self, tried: list[Tried]) -> dict[str, Any]:
        return {
            "seqs": [t.attempt.event.seq for t in tried],
            "errors": [None if t.verdict is Verdict.UNKNOWN else t.reason for t in tried],
            "pauses": [self._pause(t) for t in tried],
        }

    def _pause(self, tried: Tried) -> float:
        """Until the next attempt; with jitter, so that what was refused together does not stay together."""
        if tried.verdict is Verdict.UNKNOWN:
            return _OUTAGE_SECONDS
        if tried.verdict is Verdict.UNAVAILABLE:
            return _TOPIC_SECONDS
        pause = min(LONGEST_PAUSE, self._settings.retry_seconds * 2.0**tried.attempt.attempts)
        return pause * random.uniform(0.8, 1.2)


def _aggregate(row: tuple[Any, ...]) -> Aggregate:
    return Aggregate(row[2], row[3])


def _without_content(row: tuple[Any, ...]) -> Attempt:
    event = Event._make(row[:_EVENT])._replace(payload="")
    return Attempt(event, row[_EVENT + 1], is_last=False, is_replay=row[_EVENT] == "replaying")


def _names(aggregates: Iterable[tuple[str, str]]) -> dict[str, Any]:
    types, ids = zip(*aggregates, strict=True)
    return {"types": list(types), "ids": list(ids)}


def _firsts(rows: dict[int, Any]) -> list[int]:
    """The first seq of each aggregate."""
    first: dict[tuple[str, str], int] = {}
    for seq, row in rows.items():
        first.setdefault((row[2], row[3]), seq)
    return list(first.values())
