"""The table of parked events, and the prober, as the core meets them.

Invariants:
- A call of the table is one transaction. What the statements of `relay.parked_queries` say, is said here
  again; tests with PostgreSQL show that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.blocked import Aggregate
from outbox_pipelines.relay.core.parked import Attempt, ParkedEvent, RetryPolicy, TakenOver, Tried, Verdict
from outbox_pipelines.relay.core.quarantine import Quarantine
from outbox_pipelines.relay.core.retries import MAX_CRASHES, Retries
from tests.model.explore import Key
from tests.model.relay.database import Database, ParkedRow, Session
from tests.model.relay.kafka import Kafka

BLOCKING = ("waiting", "retrying")
ATTEMPTS = 2
_CRASH_PAUSE = 3.0


class ModelTable:
    """Implements `core.parked.ParkedRows`."""

    def __init__(self, process: Any, database: Database, session: Session) -> None:
        self._process = process
        self._database = database
        self._session = session

    @property
    def _now(self) -> float:
        now: float = self._process.clock()
        return now

    def _rows(self, *states: str) -> list[tuple[int, ParkedRow]]:
        return [(seq, row) for seq, row in sorted(self._database.parked.items()) if row.state in states]

    def _event(self, seq: int) -> Event:
        return self._database.rows[seq][1]

    def _parked(self, seq: int, row: ParkedRow) -> ParkedEvent:
        position, _ = self._database.done
        return ParkedEvent(
            self._event(seq),
            row.state,
            row.attempts,
            max(0.0, row.due - self._now),
            row.crashes,
            self._database.covers(position, seq),
        )

    def _die(self, seq: int, row: ParkedRow) -> None:
        row.state = "failed"
        self._database.ever_dead.add(seq)

    def take_over(self, *, crashed: bool) -> list[TakenOver]:
        with self._process.call("take over"):
            self._session.require()
            found = []
            marked = [(seq, row) for seq, row in self._rows(*BLOCKING, "replaying") if row.trying]
            for seq, row in marked:
                was = row.state
                is_alone = crashed and (was != "waiting" or row.crashes > 0) and len(marked) == 1
                row.trying, row.due = False, self._now
                if is_alone:
                    row.crashes += 1
                    row.due = self._now + _CRASH_PAUSE * 4 ** (row.crashes - 1)
                elif crashed:
                    row.crashes = max(row.crashes, 1)
                if is_alone and row.crashes >= MAX_CRASHES:
                    self._die(seq, row)
                elif crashed and was == "waiting":
                    row.state = "retrying"
                event = self._event(seq)
                found.append(
                    TakenOver(event, was, row.state, row.attempts, None, is_alone, row.crashes, row.due)
                )
            runs = {
                one.event.aggregate_id
                for one in found
                if crashed and one.was == "waiting" and not one.is_alone
            }
            for seq, row in self._rows("waiting"):
                if self._event(seq).aggregate_id in runs:
                    row.state, row.due = "retrying", self._now
        return found

    def revision(self) -> int:
        with self._process.call("revision"):
            self._session.require()
            return self._database.revision

    def blocked(self) -> Iterable[tuple[str, str]]:
        found = {self._event(seq).aggregate_id: None for seq, _ in self._rows(*BLOCKING)}
        return [("order", each) for each in found]

    def heads(self, aggregates: Sequence[Aggregate]) -> list[ParkedEvent]:
        with self._process.call("heads"):
            self._session.require()
            found: dict[str, ParkedEvent] = {}
            for seq, row in self._rows(*BLOCKING):
                found.setdefault(self._event(seq).aggregate_id, self._parked(seq, row))
            return [found[each.aggregate_id] for each in aggregates if each.aggregate_id in found]

    def behind(self, aggregates: Sequence[Aggregate], limit: int) -> list[ParkedEvent]:
        with self._process.call("behind"):
            self._session.require()
            found: list[ParkedEvent] = []
            for aggregate in aggregates:
                some: list[ParkedEvent] = []
                for seq, row in self._rows(*BLOCKING):
                    if self._event(seq).aggregate_id != aggregate.aggregate_id:
                        continue
                    parked = self._parked(seq, row)
                    if row.state != "waiting":
                        break
                    if parked.is_covered:
                        some.append(parked)
                found += some[:limit]
            return found

    def replays(self, limit: int) -> list[ParkedEvent]:
        with self._process.call("replays"):
            self._session.require()
            found: dict[str, ParkedEvent] = {}
            for seq, row in self._rows("replaying"):
                if row.due <= self._now:
                    found.setdefault(self._event(seq).aggregate_id, self._parked(seq, row))
            return list(found.values())

    def has_replays(self) -> bool:
        return bool(self._rows("replaying"))

    def mark(self, seqs: Sequence[int]) -> None:
        with self._process.call("mark as tried"):
            self._session.require()
            for seq in seqs:
                if seq in self._database.parked:
                    self._database.parked[seq].trying = True

    def clear(self, seqs: Sequence[int]) -> None:
        with self._process.call("clear"):
            self._session.require()
            for seq in seqs:
                if seq in self._database.parked:
                    self._database.parked[seq].trying = False

    def read(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, Event | str]]:
        for seq in seqs:
            if seq in self._database.parked:
                yield seq, self._event(seq)

    def take_large(self) -> bool:
        return True

    def return_large(self) -> None: ...

    def make_dead_letters(self, unreadable: dict[int, str]) -> list[tuple[int, int]]:
        raise NotImplementedError

    def accept(self, seqs: Sequence[int]) -> None:
        with self._process.call("accept"):
            self._session.require()
            for seq in seqs:
                self._accept(seq)

    def _accept(self, seq: int) -> None:
        row = self._database.parked.get(seq)
        if row is not None and row.state in ("retrying", "replaying"):
            row.state, row.trying, row.due = "waiting", False, 0.0

    def published(self, seqs: Sequence[int], suspects: dict[int, str]) -> None:
        with self._process.call("remove released"):
            self._session.require()
            self._session.remove(seqs)
            for seq in suspects:
                row = self._database.parked.get(seq)
                if row is not None and row.state == "waiting":
                    row.state, row.trying, row.due = "retrying", False, self._now

    def record(self, tried: Sequence[Tried], pauses: Sequence[float]) -> list[tuple[int, str, int]]:
        with self._process.call("record"):
            self._session.require()
            found: list[tuple[int, str, int]] = []
            for one, pause in zip(tried, pauses, strict=True):
                seq = one.attempt.event.seq
                row = self._database.parked.get(seq)
                if one.verdict is Verdict.PUBLISHED:
                    self._session.remove([seq])
                elif one.verdict is Verdict.ACCEPTED:
                    self._accept(seq)
                elif row is None:
                    continue
                elif one.verdict is not Verdict.REFUSED:
                    row.trying, row.due = False, self._now + pause
                elif row.state in ("retrying", "replaying"):
                    row.attempts, row.crashes, row.trying = row.attempts + 1, 0, False
                    row.due = self._now + pause
                    if row.state == "replaying" or one.attempt.is_last:
                        self._die(seq, row)
                    else:
                        row.state = "retrying"
                    found.append((seq, row.state, row.attempts))
        return found


class ModelProber:
    """Tries what it is given when the world lets it: implements `core.parked.EventProber`."""

    def __init__(self, process: Any, kafka: Kafka, *, rehearses: bool) -> None:
        self._process = process
        self._kafka = kafka
        self._rehearses = rehearses
        self.batch: list[Attempt] = []
        self.tried: list[Tried] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.batch or self.tried)

    def is_ready(self, topic: str) -> bool:
        return True

    def prepare(self, batch: list[Attempt]) -> None:
        raise NotImplementedError

    def submit(self, batch: list[Attempt]) -> None:
        self.batch = batch

    def verdicts(self) -> list[Tried]:
        found, self.tried = self.tried, []
        return found

    def harmless(self) -> list[int]:
        return []

    def answer(self) -> None:
        """Kafka's word on each."""
        for attempt in self.batch:
            self.tried.append(Tried(attempt, self._verdict(attempt.event.seq)))
        self.batch = []

    def _verdict(self, seq: int) -> Verdict:
        if self._process.happens("probe", "no answer, not done"):
            return Verdict.UNKNOWN
        if seq in self._kafka.refuses:
            return Verdict.REFUSED
        if self._rehearses:
            return Verdict.UNKNOWN if self._process.happens("probe", "no answer, done") else Verdict.ACCEPTED
        self._kafka.log.append((seq, None))
        return Verdict.UNKNOWN if self._process.happens("probe", "no answer, done") else Verdict.PUBLISHED

    def key(self) -> Key:
        return (
            tuple(attempt.event.seq for attempt in self.batch),
            tuple((one.attempt.event.seq, one.verdict.name) for one in self.tried),
        )


class Everywhere:
    """Topics that are all available: implements `core.quarantine.TopicStates`."""

    def unavailable(self, name: str) -> str | None:
        return None

    def may_be_found(self, name: str) -> bool:
        return False

    def due_for_trial(self) -> Iterable[str]:
        return ()

    def accept(self, name: str) -> None: ...


class ModelRetries(Retries):
    """The core's, over the model's table and prober."""

    def __init__(self, process: Any) -> None:
        world = process.world
        self.table = ModelTable(process, world.database, process.session)
        self.prober = ModelProber(process, world.kafka, rehearses=world.exactly_once)
        super().__init__(
            self.table,
            process.blocked,
            self.prober,
            Quarantine(Everywhere(), process.blocked, process.clock),
            clock=process.clock,
            topic_of=_topic,
            jitter=_once,
            policy_of=_policy,
            batch_bytes=1_000_000,
            on_dead_letter=_ignored,
            on_crash=_ignored,
            counters=_Counters(),
        )

    def waits(self, now: float) -> bool:
        """Whether something goes on when time passes."""
        return (
            any(
                entry.due is not None and now < entry.due < float("inf")
                for entry in self._blocked.aggregates.values()
            )
            or (self._replay_at is not None and self._replay_at > now)
            or (self._revision != self.table._database.revision and self._refresh_at > now)
            or any(
                run.marked and run.taken_at is not None and run.taken_at + 1 > now for run in self._in_flight
            )
        )

    def key(self) -> Key:
        now = self._clock()
        return (
            (self._revision, self._refresh_at <= now),
            None if self._replay_at is None else self._replay_at <= now,
            tuple(
                (
                    tuple(event.seq for event in run.released.events),
                    tuple(run.marked),
                    run.is_alone,
                    None if run.taken_at is None else run.taken_at + 1 <= now,
                )
                for run in self._in_flight
            ),
            tuple(tuple(event.seq for event in released.events) for released in self.released),
            self.prober.key(),
        )


class _Counters:
    def published(self, events: int) -> None: ...

    def rejected(self, reasons: Iterable[str]) -> None: ...


def _topic(aggregate_type: str, event_type: str) -> str:
    return aggregate_type


def _policy(aggregate_type: str, event_type: str) -> RetryPolicy:
    return RetryPolicy(ATTEMPTS, 1.0)


def _once() -> float:
    return 1.0


def _ignored(what: object) -> None: ...
