"""A relay's process in the model: the core, driven as the threads of `relay.worker` drive it.

Invariants:
- A thread's round runs to its end, but for where a plan says that another thread's round comes in between,
  that the process dies, or that a session is lost: before or after a named call.
- Threads share the blocked and the ledger alone, so a round of another one matters only between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from outbox_pipelines.core.event import Event
from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.relay.core.barrier import Barrier, Step
from outbox_pipelines.relay.core.batch import Batch, BatchQueue, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import Breaker, State
from outbox_pipelines.relay.core.crash_guard import CrashGuard
from outbox_pipelines.relay.core.delivery import Complete, Delivery
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.ledger import Ledger, SettleRequest
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.record import take_up
from outbox_pipelines.relay.core.settler import Settler
from outbox_pipelines.relay.core.transactions import TransactionalPublisher
from tests.model.explore import Key
from tests.model.relay.database import Change, Session, Source, position_key
from tests.model.relay.kafka import Producer
from tests.model.relay.parked import ModelRetries

Plan = tuple[str, str] | None
"""A call, and what happens there: once, in the round that is planned."""
HEARTBEAT = 2.0


class DeadError(Exception):
    """The process was killed."""


class ImpossibleError(Exception):
    """Threads would wait for each other here: this order of rounds does not occur."""


class ModelLedger(Ledger):
    """One whose requests are carried out by the settling thread's rounds."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def wait_for(self, request: SettleRequest) -> None:
        while not request.is_done:
            self._process.settle_once()


class Process:
    """A relay that has taken the shard.

    Args:
        who: the slot that it runs in.
        identity: unlike that of every process before; the same after it has started over.
    """

    def __init__(self, world: Any, who: int, identity: int) -> None:
        self.world = world
        self.who = who
        self.identity = identity
        self.plan: Plan = None
        self.in_settle = False
        self.in_publish = False
        self.is_stopped = False
        world.plan_for(self)
        self.clock = world.clock
        database, kafka = world.database, world.kafka
        crashed = database.take(who, identity)
        self.session = Session(self, database, who)
        transactional = world.exactly_once
        with self.call("fence"):
            producer = Producer(self, kafka, transactional=transactional)
        self.producer = producer
        if transactional:
            if not self.session.barrier_paused():
                raise ShardLostError("another relay has taken the shard")
            take_up(self.session, kafka.last_record())
        self.blocked = BlockedAggregates(self.clock)
        self.ledger = ModelLedger(self)
        self.batches = BatchQueue()
        self.crash_guard = CrashGuard(
            database.crashes,
            (database.crash_guard_seq, database.crash_guard_crashes),
            mark=self.mark,
            on_passed=self.ignore,
        )
        self.publisher: Publisher
        if transactional:
            self.publisher = world.transactional(
                producer,
                self.blocked,
                self.session.position,
                self.session.tick_id,
                patience=10.0,
                clock=self.clock,
                new_id=self.new_id,
            )
        else:
            self.publisher = Publisher(producer, self.blocked, patience=10.0, clock=self.clock)
        self.retries = ModelRetries(self)
        self.retries.begin(crashed=crashed)
        self.settler = Settler(
            self.session,
            self.ledger,
            self.blocked,
            self.retries,
            self.publisher.breaker,
            clock=self.clock,
            heartbeat=HEARTBEAT,
            is_stopped=self.stopped,
            on_settled=self.ignore,
            on_dead_letter=self.ignore,
        )
        self.flow = Flow(
            self.publisher,
            self.batches,
            self.ledger,
            self.blocked,
            self.retries,
            self.crash_guard,
            clock=self.clock,
            is_stopped=self.stopped,
            until_empty=False,
            on_complete=self.ignore,
        )
        if isinstance(self.publisher, TransactionalPublisher):
            self.publisher.requests = self.flow
        self.source = Source(self.session.position)
        self.barrier = Barrier(self.settler.barrier_pause)
        self.crash_guard.until(database.snapshot())
        # The first settle of a relay is a sign of life; it moves nothing.
        self.settler._beat_at = self.clock()

    # --- what the core calls ------------------------------------------------------------------------------

    def new_id(self) -> str:
        found: str = self.world.new_id()
        return found

    def stopped(self) -> bool:
        return self.is_stopped

    def ignore(self, *_: object) -> None: ...

    def mark(self, seq: int | None) -> None:
        with self.call("mark"):
            self.session.mark(seq)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call of the world, with what is planned before or after it."""
        self.world.covered.add(name)
        what = None
        if self.plan is not None and self.plan[0] == name:
            what, self.plan = self.plan[1], None
            self.world.covered.add(f"{name}: {what}")
        if what == "dies before":
            raise DeadError
        if what == "fails":
            raise ShardLostError("the session has ended")
        if what == "another thread before":
            self.other_thread()
        yield
        if what == "dies after":
            raise DeadError
        if what == "answer lost":
            raise ShardLostError("the answer was lost")

    def happens(self, name: str, what: str) -> bool:
        """Whether this is what is planned here."""
        self.world.covered.add(name)
        if self.plan != (name, what):
            return False
        self.plan = None
        self.world.covered.add(f"{name}: {what}")
        return True

    def other_thread(self) -> None:
        if self.in_settle and self.in_publish:
            raise ImpossibleError
        if self.in_settle:
            self.publish_once()
        else:
            self.settle_once()

    def waits(self) -> bool:
        """Whether something goes on when time passes."""
        # A position without events is settled with the next heartbeat.
        waits_for_beat = self.barrier.is_taking_part and self.settler._position != self.world.database.done[0]
        return (
            waits_for_beat
            or self.publisher.breaker.state is not State.CLOSED
            or self.retries.waits(self.clock())
        )

    # --- rounds of its threads ----------------------------------------------------------------------------

    def can_read(self) -> bool:
        return not (self.is_stopped or self.barrier.is_taking_part) and self._has_room(self.peek())

    def _has_room(self, batch: Batch | None) -> bool:
        return batch is not None and self.batches.takes(batch)

    def peek(self, upto: Snapshot | None = None) -> Batch | None:
        return self._batch(upto)[0]

    def can_meet(self) -> bool:
        """Whether the reading thread sees that the number of shards is to change."""
        database = self.world.database
        return not self.is_stopped and (
            database.wanted or database.epoch != self.session.epoch or self.barrier.is_taking_part
        )

    def meet(self) -> bool:
        """The reading thread: one step of a change; False if the relay has to end."""
        database = self.world.database
        step = self.barrier.step(Change(database, self.session.epoch))
        self.world.covered.add(f"barrier: {step.value}")
        if step is Step.PREPARE:
            self.barrier.prepared(True)
        elif step is Step.READ_REST and self.source.target is None:
            self.barrier.read_rest()
        elif step is Step.READ_REST and self._has_room(self.peek()):
            self.read()
        elif step is Step.READ and self.peek(database.barrier) is None:
            self.barrier.read_all()
        elif step is Step.READ and self._has_room(self.peek(database.barrier)):
            self.read(database.barrier)
        elif step in (Step.PAUSE, Step.ARRIVE):
            position, _ = database.done
            here = self.source.done if step is Step.PAUSE else database.barrier
            is_meant = step is Step.ARRIVE or database.barrier is None
            if database.wanted and is_meant and position.target is None and position.done == here:
                database.barrier_paused = True
                database.barrier_reached |= step is Step.ARRIVE
        return step is not Step.END

    def read(self, upto: Snapshot | None = None) -> None:
        """The reading thread: one batch."""
        batch, source = self._batch(upto)
        assert batch is not None
        if self.crash_guard.step() == 1 and batch.events:
            (event,) = batch.events
            if reason := self.crash_guard.before(event.seq):
                batch = replace(batch, suspects={event.seq: reason})
        self.source = source
        self.batches.add(batch)

    def _batch(self, upto: Snapshot | None = None) -> tuple[Batch | None, Source]:
        database, old = self.world.database, self.source
        new = Source(self.session.position)
        target: Snapshot = old.target or upto or database.snapshot()
        if target == old.done:
            return None, old
        events = [event for event in database.visible(target, old.done) if event.seq > old.last_seq]
        width = min(self.world.batch_events, self.crash_guard.step() or self.world.batch_events)
        some, rest = events[:width], events[width:]
        # A tick that was opened by a predecessor is not joined with others.
        batch = Batch(some, len(some), old.done, target, not rest, old.target is None)
        if unreadable := {event.seq: "damaged" for event in some if event.seq in self.world.unreadable}:
            batch = replace(batch, unreadable=unreadable)
        if rest:
            new.done, new.target, new.last_seq = old.done, target, some[-1].seq
        else:
            new.done, new.target, new.last_seq = target, None, 0
        return batch, new

    def publish_once(self) -> bool:
        """The publishing thread: one round; False at the end."""
        was, self.in_publish = self.in_publish, True
        going = self.flow.step()
        self.in_publish = was
        return going

    def settle_once(self, *, last: bool = False) -> None:
        """The settling thread: one round."""
        if self.in_settle:
            raise ImpossibleError
        self.in_settle = True
        self.settler.settle(last=last)
        if self.crash_guard.is_over:
            self.crash_guard.is_over = False
            with self.call("calm"):
                self.session.calm()
        if not last:
            self.settler.advance()
        self.in_settle = False

    def end(self, *, failed: bool) -> None:
        """What a worker does when a thread has failed, or all is done."""
        settler_failed = failed and self.in_settle
        self.in_settle = self.in_publish = False
        if not settler_failed:
            try:
                self.settle_once(last=True)
            except ShardLostError:
                failed = True
        if not failed:
            # It waits for the answers to what was sent.
            self.retries.prober.answer()
        with suppress(ShardLostError):
            self.retries.close()
        self.publisher.discard()
        self.session.release()

    def key(self) -> Key:
        source, flow, settler, publisher = self.source, self.flow, self.settler, self.publisher
        return (
            (tuple(source.done), None if source.target is None else tuple(source.target), source.last_seq),
            tuple(_batch(batch) for batch in self.batches._waiting),
            tuple(_delivery(delivery) for delivery in publisher._deliveries),
            _breaker(publisher.breaker, self.clock()),
            publisher._unexplained,
            _transaction(publisher) if isinstance(publisher, TransactionalPublisher) else None,
            self.producer.has_failed,
            tuple(_complete(batch) for batch in self.ledger._completed),
            tuple(_request(request) for request in self.ledger._requests),
            (position_key(settler._position), settler._beat_at + HEARTBEAT <= self.clock()),
            tuple(
                (tuple(name), entry.in_flight, _due(entry.due, self.clock()), entry.busy)
                for name, entry in self.blocked.aggregates.items()
            ),
            self.blocked._next <= self.clock(),
            (flow._reading, flow._alone is None),
            (self.session.barrier_paused(), position_key(self.session.position), self.session.tick_id),
            (
                self.crash_guard.is_needed,
                self.crash_guard._left,
                self.crash_guard._singles,
                self.crash_guard.is_over,
            ),
            (self.is_stopped, self.identity == self.world.database.identity),
            (self.barrier._is_prepared, self.barrier._has_read_all, self.settler.barrier_pause.is_wanted),
            self.settler.barrier_pause.is_reached,
            self.retries.key(),
        )


def _request(request: SettleRequest) -> Key:
    return request.position and position_key(request.position), request.tick_id


def _due(due: float | None, now: float) -> Key:
    if due is None:
        return None
    return "in the table" if due == float("inf") else due <= now


def _breaker(breaker: Breaker, now: float) -> Key:
    quiet = None if breaker._quiet_since is None else breaker._quiet_since + 10 <= now
    return breaker.state.value, quiet, breaker._probe_at <= now, breaker.takes


def _batch(batch: Batch | ReleasedBatch | None) -> Key:
    if batch is None:
        return None
    seqs = tuple(event.seq for event in batch.events)
    if isinstance(batch, ReleasedBatch):
        return seqs
    return (
        tuple(batch.done),
        tuple(batch.target),
        seqs,
        batch.ends_tick,
        batch.starts_tick,
        tuple(batch.suspects),
    )


def _seqs(events: list[Event]) -> Key:
    return tuple(event.seq for event in events)


def _held(batch: Delivery | Complete) -> Key:
    return tuple((seq, outcome.state) for seq, (_, outcome) in batch.parked.items())


def _delivery(delivery: Delivery) -> Key:
    return (
        _batch(delivery.batch),
        _seqs(delivery.unsent),
        _seqs(delivery.in_flight),
        delivery.acknowledged,
        delivery._acknowledged_before,
        tuple((event.seq, refusal.cause.name) for event, refusal in delivery.failed),
        _held(delivery),
        delivery.in_table,
        tuple(sorted(delivery.halted)),
    )


def _complete(batch: Complete) -> Key:
    return _batch(batch.batch), _held(batch), batch.is_in_table


def _transaction(publisher: TransactionalPublisher) -> Key:
    return (
        publisher._phase.value,
        len(publisher._committing),
        tuple(_complete(batch) for batch in publisher._complete),
        publisher._must_settle,
        publisher._must_replace,
        publisher._tick,
        None if publisher._open is None else tuple(map(tuple, publisher._open)),
        publisher._last_seq,
        publisher._is_finished,
        publisher._began + 0.25 <= publisher._clock(),
    )
