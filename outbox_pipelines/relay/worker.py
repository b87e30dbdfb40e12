"""The relay of one shard: source → encode → publish → settle, in three threads around the core.

Invariants:
- The reader stays a batch or two ahead; the calling thread publishes; the settler moves the position and
  handles parked events. Each thread owns its connection. `shared` contains what they share.
- The first failure in any thread ends all three and is raised to the caller. Events in flight are read again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

import psycopg

from outbox_pipelines.config.rules import Router, of_types
from outbox_pipelines.core import outages
from outbox_pipelines.core.answers import limited_after
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.crash_guard import CrashGuard
from outbox_pipelines.relay.core.flow import Flow
from outbox_pipelines.relay.core.parked import DeadLetter, RetryPolicy, TakenOver
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.quarantine import Quarantine
from outbox_pipelines.relay.core.retries import MAX_CRASHES, Retries
from outbox_pipelines.relay.core.settler import MANY_EVENTS, Settler
from outbox_pipelines.relay.core.transactions import TransactionalPublisher
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.kafka.transactional_producer import FencingProducer, kafka_names, recover
from outbox_pipelines.relay.lease.owner_session import beating
from outbox_pipelines.relay.lease.shard import Settled, Shard
from outbox_pipelines.relay.parking.delayed_events import DelayedEvents
from outbox_pipelines.relay.parking.notify import DueCommands
from outbox_pipelines.relay.parking.parked_table import ParkedTable
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.relay.read.reader import Reader
from outbox_pipelines.relay.run import Run, Totals
from outbox_pipelines.relay.shared import SharedBlockedAggregates, SharedLedger, Threads
from outbox_pipelines.settings import ProcessSettings, RelaySettings

_LOG = logging.getLogger(__name__)
# How long a relay that ends waits for the operator's commands: a successor may be waiting, and runs the rest.
_HURRY_SECONDS: Final = 1.0
_OFF_SECONDS: Final = 10.0
# Between two settles: each is a commit, and it bounds the duplicates after a crash.
_SETTLE_PAUSE: Final = 0.01
# Between two attempts to recover a shard; each of them waits for Kafka.
_RECOVERY_PAUSE: Final = 1.0


def make_worker(
    settings: ProcessSettings,
    shard: Shard,
    producer: IdempotentProducer,
    blocked: SharedBlockedAggregates,
    run: Run,
) -> Worker:
    """Return a worker for a shard that has been taken."""
    uses_transactions = settings.delivery == "exactly_once" or shard.tick_id is not None
    if uses_transactions and (fencing := _recovered(settings, shard, producer, run)) is not None:
        producer.close()
        producer = fencing
    return Worker(settings, shard, producer, make_publisher(settings, shard, producer, blocked), blocked, run)


def make_publisher(
    settings: RelaySettings, shard: Shard, producer: IdempotentProducer, blocked: SharedBlockedAggregates
) -> Publisher:
    """Return the publisher for this producer: with transactions if it fences."""
    patience, clock = settings.breaker_seconds, time.monotonic
    if isinstance(producer, FencingProducer):
        tick = shard.position, shard.tick_id
        return TransactionalPublisher(
            *(producer, blocked, *tick),
            patience=patience,
            clock=clock,
            new_id=lambda: str(uuid4()),
            timeout=settings.transaction_seconds,
        )
    return Publisher(producer, blocked, patience=patience, clock=clock)


def _recovered(
    settings: ProcessSettings, shard: Shard, producer: IdempotentProducer, run: Run
) -> FencingProducer | None:
    """Return a producer for exactly_once; None in at_least_once, after applying the other mode's last record.

    While Kafka is unavailable it waits as the owner of the shard: otherwise the outage would look like a
    missing relay.

    Raises:
        UnavailableError: the relay is asked to stop, or runs until empty.
    """
    started = time.monotonic()
    run.metrics.breaker(shard.breaker)
    while True:
        try:
            # Sooner than what follows it says that no broker answers.
            producer.connect()
            first = recover(settings, shard, lambda error: None)
            break
        except UnavailableError as error:
            if run.must_hand_over(shard, started):
                run.stop.set()
            if run.until_empty or run.stop.is_set():
                raise
            _show(shard, run, State.OPEN, str(error))
            producer.idle()
            run.stop.wait(_RECOVERY_PAUSE)
    _show(shard, run, State.CLOSED, None)
    if settings.delivery == "exactly_once":
        return FencingProducer(settings, shard, first)
    shard.forget_tick()
    return None


def _show(shard: Shard, run: Run, state: State, reason: str | None) -> None:
    """Show in the database, the metrics and the log whether Kafka is available, if that has changed."""
    if (state, reason or "") == (shard.breaker, shard.breaker_reason):
        return
    before, before_reason = shard.breaker, shard.breaker_reason
    run.metrics.breaker(state)
    shard.show_breaker(state, reason)
    if state is before:
        return
    if state is State.OPEN:
        _LOG.warning("%s", outages.described(reason))
    elif state is State.CLOSED:
        _LOG.warning("%s is available again", outages.server_of(before_reason))


class Worker:
    """Relays an owned shard until it is stopped."""

    def __init__(
        self,
        settings: ProcessSettings,
        shard: Shard,
        producer: IdempotentProducer,
        publisher: Publisher,
        blocked: SharedBlockedAggregates,
        run: Run,
    ) -> None:
        self._run = run
        self._shard = shard
        self._producer = producer
        self._publisher = publisher
        self._blocked = blocked
        self._heartbeat = settings.lease_seconds / 5
        self._started = time.monotonic()
        self._end = threading.Event()
        self._threads = Threads(self._failed)
        self._settled: deque[Settled] = deque()
        self.totals = Totals()
        if shard.breaker is not State.CLOSED:
            # As the previous owner recorded it; a probe updates it.
            run.metrics.breaker(State.OPEN)
            publisher.breaker.trip(self._started, shard.breaker_reason)
        self._in_transactions = isinstance(publisher, TransactionalPublisher)
        # The statement that opens a tick settles the one before.
        self._ledger = SharedLedger(_SETTLE_PAUSE if self._in_transactions else 0.0)
        large, has_passed = threading.Lock(), threading.Event()
        self._guard_turn, self._trial_turn = run.host.turn(), run.host.turn()
        self._marks = _Marks(shard)
        self._crash_guard = CrashGuard(
            shard.crashes,
            (shard.crash_guard_seq, shard.crash_guard_crashes),
            mark=self._marks.mark,
            on_passed=has_passed.set,
        )
        self._parked = ParkedTable(settings, shard, large)
        self._commands = DueCommands(settings, shard)
        self._delayed = DelayedEvents(shard)
        self._prober = _make_prober(settings, shard, producer)
        self._retries = self._make_retries(settings)
        self._settler = self._make_settler()
        self._reader = self._make_reader(settings, large, has_passed)
        self._flow = self._make_flow()
        if isinstance(publisher, TransactionalPublisher):
            publisher.requests = self._flow

    def _make_retries(self, settings: ProcessSettings) -> Retries:
        return Retries(
            self._parked,
            self._blocked,
            self._prober,
            Quarantine(self._producer.lookups, self._blocked, time.monotonic),
            clock=time.monotonic,
            topic_of=Router(settings).topic_or_empty,
            jitter=lambda: random.uniform(0.8, 1.2),
            policy_of=_policy_of(settings),
            batch_bytes=settings.batch_bytes,
            on_dead_letter=self._run.on_dead_letter,
            on_crash=_warn,
            counters=self._run.metrics,
            may_isolate=self._trial_turn.take,
        )

    def _make_settler(self) -> Settler:
        return Settler(
            self._shard,
            self._ledger,
            self._blocked,
            self._retries,
            self._publisher.breaker,
            clock=time.monotonic,
            heartbeat=self._heartbeat,
            is_stopped=self._run.stop.is_set,
            on_settled=self._count,
            on_dead_letter=lambda event, why: self._run.on_dead_letter(DeadLetter(event, 0, why)),
        )

    def _make_reader(
        self, settings: ProcessSettings, large: threading.Lock, has_passed: threading.Event
    ) -> Reader:
        return Reader(
            settings,
            self._shard,
            self._crash_guard,
            self._settler.barrier_pause,
            large,
            ending=self._ending,
            end=self._end,
            has_passed=has_passed,
            prepare=self._producer.prepare,
            until_empty=self._run.until_empty,
            host=self._run.host,
            turn=self._guard_turn,
        )

    def _make_flow(self) -> Flow:
        return Flow(
            self._publisher,
            self._reader.batches,
            self._ledger,
            self._blocked,
            self._retries,
            self._crash_guard,
            clock=time.monotonic,
            is_stopped=self._run.stop.is_set,
            until_empty=self._run.until_empty,
            on_complete=self._run.metrics.acknowledged,
            report_poll=self._run.host.report_poll,
        )

    def run(self) -> Totals:
        """Relay the shard; return when all events that were read are published or parked, and settled.

        Raises:
            ShardLostError: the shard or the connection to the database is lost.
            UnavailableError: with `until_empty`, Kafka has been unavailable for too long.
        """
        threads: list[threading.Thread] = []
        try:
            self._retries.begin(crashed=self._shard.predecessor_crashed)
            if self._run.until_empty:
                # Before the reader takes its first snapshot.
                with beating(self._shard.beat, self._heartbeat):
                    self._delayed.move_all()
            # The end waits for the reader, whose connection may get no answer although the shard's does.
            with limited_after(self._end):
                threads.append(self._threads.start(self._reader.run, "outbox-reader"))
            threads.append(self._threads.start(self._settle, "outbox-settler"))
            while self._threads.failure is None and self._flow.step():
                self._report()
        except BaseException as error:  # noqa: BLE001 - raised below, when the threads have ended
            self._threads.fail(error)
        finally:
            self._end.set()
            for reader in threads[:1]:
                reader.join()
            self._ledger.finish()
            for settler in threads[1:]:
                settler.join()
            # Ending a transaction may take longer than the lease; a shard lost now counts as a crash.
            with beating(self._shard.beat, self._heartbeat):
                self._threads.guard(self._close_prober)
                self._commands.close(_OFF_SECONDS if self._run.until_empty else _HURRY_SECONDS)
                self._marks.close()
                self._publisher.discard()
            self._guard_turn.give_back()
            self._trial_turn.give_back()
        self._report()
        self.totals.events += self._retries.published
        self.totals.seconds = time.monotonic() - self._started
        if self._threads.failure is not None:
            raise self._threads.failure
        if self._run.until_empty:
            totals = self.totals
            totals.unpublished, totals.paused, totals.paused_seconds = self._parked.unpublished()
        return self.totals

    def _close_prober(self) -> None:
        """End the prober; after a graceful stop, record what it has published as no longer parked."""
        if self._threads.failure is None:
            self._prober.close()
        else:
            self._prober.close(wait_seconds=0.0)
        self._retries.close()

    def _settle(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ledger.wait_for_work(self._settler.rest)
            events = self._settler.settle(last=is_last)
            self._tell()
            if is_last:
                return
            self._commands.look(time.monotonic())
            self._delayed.look(time.monotonic())
            self._settler.advance()
            if self._retries.is_quiet:
                self._trial_turn.give_back()
            if self._run.must_hand_over(self._shard, self._started):
                self._run.stop.set()
            if not self._in_transactions and events is not None and events < MANY_EVENTS:
                self._end.wait(_SETTLE_PAUSE)

    def _count(self, events: int, seconds: float, settled: Settled | None) -> None:
        self._run.metrics.settled(events, seconds, settled)
        self.totals.events += events
        if settled is not None:
            self._settled.append(settled)

    def _tell(self) -> None:
        """Show what has changed: whether Kafka is available, and that no event is suspected of a crash."""
        breaker = self._publisher.breaker
        if breaker.state is not self._shard.breaker:
            _show(self._shard, self._run, breaker.state, breaker.reason)
        if self._crash_guard.is_over:
            self._crash_guard.is_over = False
            self._shard.calm()
            self._guard_turn.give_back()

    def _report(self) -> None:
        while self._settled:
            # Called in this thread, about once a second: the producer's topics belong to this thread.
            self._run.on_progress(replace(self._settled.popleft(), topics=self._producer.topics))

    def _ending(self) -> bool:
        return self._run.stop.is_set() or self._end.is_set()

    def _failed(self) -> None:
        self._end.set()
        self._ledger.fail()


def _make_prober(settings: ProcessSettings, shard: Shard, producer: IdempotentProducer) -> Prober:
    rehearses = settings.delivery == "exactly_once"
    return Prober(
        settings,
        producer.lookups,
        f"{kafka_names(shard).transactional_id}-prober" if rehearses else None,
        schema_ids=producer.schema_ids,
    )


def _policy_of(settings: RelaySettings) -> Callable[[str, str], RetryPolicy]:
    def policy(aggregate_type: str, event_type: str) -> RetryPolicy:
        own = of_types(settings, aggregate_type, event_type)
        return RetryPolicy(own.max_attempts, own.retry_seconds)

    return policy


def _warn(one: TakenOver) -> None:
    _LOG.warning(
        "the relay crashed while it was publishing %s alone (crash %d of %d): next attempt in %.0f s",
        *(one.event, one.crashes, MAX_CRASHES, one.due_in),
    )


class _Marks:
    """Records which event is read alone, after relays have crashed."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._connection: psycopg.Connection[Any] | None = None

    def mark(self, seq: int | None) -> None:
        """Record that this event is read next; None: no event is the cause if the relay crashes now."""
        if self._connection is None:
            self._connection = self._shard.connect("crash_guard")
        self._connection.execute(relay_sql.CRASH_GUARD, {**self._shard.key, "seq": seq})

    def close(self) -> None:
        """Close the connection, if one was opened."""
        if self._connection is not None:
            self._connection.close()
