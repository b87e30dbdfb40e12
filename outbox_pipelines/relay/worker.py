"""The relay of one shard: source → encode → publish → settle, in three threads.

Invariants:
- A reader stays a piece or two ahead; the calling thread publishes; a settler moves the position when a piece
  and all before it are complete, and looks after what is parked. Each owns its connection.
- The position never covers an event that is neither acknowledged nor parked: it moves over a `Complete` only.
- The first failure anywhere ends all three, and is raised to the caller; what was on its way is read again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty
from typing import Final

import psycopg

from outbox_pipelines.errors import AwayError
from outbox_pipelines.event import Piece, Released
from outbox_pipelines.relay.breaker import State
from outbox_pipelines.relay.caution import Caution
from outbox_pipelines.relay.delivery import Complete, Delivery
from outbox_pipelines.relay.heartbeats import beating
from outbox_pipelines.relay.metrics import Metrics
from outbox_pipelines.relay.parking import ParkingLot
from outbox_pipelines.relay.position import Position
from outbox_pipelines.relay.publisher import Publisher
from outbox_pipelines.relay.reader import CHANGE_POLL, MANY_EVENTS, Reader
from outbox_pipelines.relay.retries import DeadLetter, Retries
from outbox_pipelines.relay.shards import Parked, Settled, Shard, ShardLostError
from outbox_pipelines.relay.transactions import TransactionalPublisher
from outbox_pipelines.settings import Settings

_LOG = logging.getLogger(__name__)
# Complete pieces that wait for the settler: a slow database must not fill the memory.
_MOST_UNSETTLED: Final = 16
_MOST_UNSETTLED_BYTES: Final = 16_000_000
# How long a graceful stop waits for acknowledgements: an outage must not hold it up for ever.
_STOP_SECONDS: Final = 10.0
# How long a run until empty waits for a Kafka that is away.
_OUTAGE_SECONDS: Final = 60.0
# How long a relay that ends waits for the operator's commands: a successor may be waiting, and runs them too.
_HURRY_SECONDS: Final = 1.0
_OFF_SECONDS: Final = 10.0
# An event that kills does so when it is encoded, compressed or sent.
_INNOCENT_SECONDS: Final = 1.0
# While acknowledgements are awaited, new pieces are looked for this often.
_REPORT_POLL: Final = 0.001
# Between two settles: each is a commit, and duplicates after a crash are bounded by it.
_SETTLE_PAUSE: Final = 0.01


@dataclass(slots=True)
class Totals:
    """What a worker has done."""

    events: int = 0
    held: int = 0
    """After a run until empty: events of the table that are parked or dead letters."""
    seconds: float = 0.0
    paused: int = 0
    """How many of `held` wait for their next attempt because a relay died while it tried them."""
    paused_seconds: float = 0.0
    """How long the first of these waits at least."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.events + other.events,
            self.held + other.held,
            self.seconds + other.seconds,
            self.paused + other.paused,
            max(self.paused_seconds, other.paused_seconds),
        )


class Worker:
    """Relays a shard that has been taken, until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        publisher: Publisher,
        lot: ParkingLot,
        *,
        stop: threading.Event,
        until_empty: bool = False,
        hand_over_after: float | None = None,
        on_progress: Callable[[Settled], None] | None = None,
        on_dead_letter: Callable[[DeadLetter], None] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._settings = settings
        self._shard = shard
        self._publisher = publisher
        self._lot = lot
        self._stop = stop
        self._until_empty = until_empty
        self._hand_over_after = hand_over_after
        self._on_progress = on_progress or (lambda settled: None)
        self._on_dead_letter = on_dead_letter or (lambda dead_letter: None)
        self._metrics = metrics or Metrics()
        large = threading.Lock()
        self._retries = Retries(
            settings,
            shard,
            lot,
            large,
            topics=publisher.lookups,
            on_dead_letter=self._on_dead_letter,
            metrics=self._metrics,
        )
        self._caution = Caution(shard)
        self._heartbeat = settings.lease_seconds / 5
        self._started = time.monotonic()
        self._end = threading.Event()
        self._failure: BaseException | None = None
        self._reader = Reader(
            settings,
            shard,
            self._caution,
            large,
            ending=self._ending,
            end=self._end,
            prepare=publisher.prepare,
            until_empty=until_empty,
        )
        self._hold = self._reader.hold
        self._settled: deque[Settled] = deque()
        self._outcome = threading.Condition()
        self._completed: list[Complete] = []
        self._is_exactly_once = isinstance(publisher, TransactionalPublisher)
        if isinstance(publisher, TransactionalPublisher):
            publisher.ledger = self
        self._orders: list[_Order] = []
        self._unsettled = 0
        """Complete pieces with events that the settler has not dealt with."""
        self._unsettled_bytes = 0
        self._finished = False
        self._stop_by = math.inf
        self._away_since: float | None = None
        self._shown = State.CLOSED
        self.totals = Totals()

    def run(self) -> Totals:
        """Relays; returns once all that was read is published or parked, and settled.

        Raises:
            ShardLostError: the shard or the database is gone.
            AwayError: with `until_empty`, Kafka has been away for too long.
        """
        self._retries.begin(died=self._shard.predecessor_died)
        reader = self._thread(self._reader.run, "outbox-reader")
        settler = self._thread(self._settle, "outbox-settler")
        try:
            self._publish()
        except BaseException as error:  # noqa: BLE001 - raised below, when the threads have ended
            self._fail(error)
        finally:
            self._end.set()
            reader.join()
            with self._outcome:
                self._finished = True
                self._outcome.notify_all()
            settler.join()
            # Ending a transaction may take longer than the lease; a shard that is lost now counts as a death.
            with beating(self._shard.beat, self._heartbeat):
                self._retries.close(command_seconds=_OFF_SECONDS if self._until_empty else _HURRY_SECONDS)
                self._caution.close()
                self._publisher.discard()
        self._report()
        self.totals.events += self._retries.published
        self.totals.seconds = time.monotonic() - self._started
        if self._failure is not None:
            raise self._failure
        if self._until_empty:
            totals = self.totals
            totals.held, totals.paused, totals.paused_seconds = self._retries.held()
        return self.totals

    def _publish(self) -> None:
        reading = True
        while self._failure is None and not self._is_done(reading):
            if self._stop.is_set():
                # What was read and not handed over is read again. While Kafka is unavailable nobody would
                # take the end of the queue, and the stop would never end.
                reading = False
            room = self._publisher.has_room and self._settler_has_room()
            try:
                piece = self._next(reading, room)
            except Empty:
                idle = reading and room and not self._publisher.pending
                wait = 0.0 if idle else _REPORT_POLL if reading and room else 0.05
                self._publisher.poll(wait, linger=not room)
            else:
                if piece is None:
                    reading = False
                elif isinstance(piece, Piece) and (self._caution.is_needed or piece.is_large):
                    if not self._publish_alone(piece):
                        return
                else:
                    self._publisher.publish(piece)
                # A variable would keep its content in memory until there is another.
                del piece
            self._hand_to_settler(self._publisher.acknowledged())
            self._report()

    def _settler_has_room(self) -> bool:
        return self._unsettled < _MOST_UNSETTLED and self._unsettled_bytes < _MOST_UNSETTLED_BYTES

    def _next(self, reading: bool, room: bool) -> Piece | Released | None:
        """What to publish next, None at the end of what is to be read; `Empty` where there is nothing now."""
        if not room:
            raise Empty
        released = self._retries.released
        if released and self._publisher.takes(released[0]):
            return released.popleft()
        if not reading:
            raise Empty
        patience = 0.05 if self._lot.blocked else 0.2
        return self._reader.pieces.get(0.0 if self._publisher.pending else patience, self._publisher.takes)

    def open_tick(self, position: Position | None, tick_id: str) -> None:
        self._order(_Order(position, tick_id))

    def park(self, deliveries: list[Delivery]) -> None:
        self._order(_Order(parked=[delivery.aside() for delivery in deliveries]))

    def settle_all(self) -> None:
        self._order(_Order())

    def _order(self, order: _Order) -> None:
        """Has something written by the settler, after all that is complete; waits for it."""
        self._hand_to_settler(self._publisher.acknowledged())
        with self._outcome:
            self._orders.append(order)
            self._outcome.notify()
            while not (order.is_done or self._failure is not None):
                self._outcome.wait(0.1)
        if not order.is_done:
            raise ShardLostError("the shard was lost within a transaction")

    def _is_done(self, reading: bool) -> bool:
        if self._stop.is_set() and not reading:
            # What is on its way may finish; what is parked waits for the next relay.
            self._stop_by = min(self._stop_by, time.monotonic() + _STOP_SECONDS)
            is_over = self._publisher.breaker.state is State.OPEN or time.monotonic() > self._stop_by
            return is_over or not self._publisher.pending
        if self._until_empty:
            self._check_outage()
        if reading or self._publisher.pending or self._unsettled:
            return False
        return self._retries.is_settled and not self._retries.released

    def _check_outage(self) -> None:
        """A run until empty is awaited by somebody: it does not wait for ever."""
        breaker = self._publisher.breaker
        if breaker.state is State.CLOSED:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()
        elif time.monotonic() - self._away_since > _OUTAGE_SECONDS:
            raise AwayError(f"Kafka has taken nothing for {_OUTAGE_SECONDS:.0f} s: {breaker.reason}")

    def _publish_alone(self, piece: Piece) -> bool:
        """Publishes a piece and waits until it is settled; False to end.

        Where relays have died, and for the memory's sake where the piece is large.
        """
        self._publisher.publish(piece)
        innocent_at = time.monotonic() + _INNOCENT_SECONDS
        while self._publisher.pending or self._unsettled:
            if time.monotonic() > innocent_at:
                self._caution.waits()
                innocent_at = math.inf
            if self._failure is not None or (self._stop.is_set() and self._is_done(reading=False)):
                return False
            self._publisher.poll(_REPORT_POLL, linger=False)
            self._hand_to_settler(self._publisher.acknowledged())
        self._caution.passed(piece)
        return True

    def _settle(self) -> None:
        position = self._shard.position
        beat_at = 0.0
        batch: Complete | None
        while True:
            with self._outcome:
                self._outcome.wait_for(self._has_work, timeout=self._rest(beat_at))
                batches, self._completed = self._completed, []
                orders, self._orders = self._orders, []
                finished = self._finished
            ticks = [batch for batch in batches if isinstance(batch.piece, Piece)]
            for batch in ticks:
                assert isinstance(batch.piece, Piece)
                position = batch.piece.position
            # First, since Kafka's record of what was released is believed only until the next tick is opened.
            for batch in batches:
                if isinstance(batch.piece, Released):
                    self._retries.settled(batch)
            events = 0
            is_due = time.monotonic() - beat_at >= self._heartbeat
            tick_id = None
            for order in orders:
                if order.position is not None:
                    position = position.opened_as(order.position)
                tick_id = order.tick_id or tick_id
            if is_due or finished or tick_id or any(batch.piece.events for batch in ticks):
                events = self._settle_ticks(position, ticks, tick_id=tick_id, last=finished)
                beat_at = time.monotonic()
            with self._outcome:
                self._unsettled -= sum(1 for batch in batches if batch.piece.events)
                self._unsettled_bytes -= sum(batch.piece.size for batch in batches)
            for order in orders:
                if order.parked:
                    self._shard.park(order.parked)
            with self._outcome:
                for order in orders:
                    order.is_done = True
                self._outcome.notify_all()
            self._tell()
            if finished:
                return
            self._retries.look_after(may_try=self._may_try())
            self._hold.is_reached = self._hold.is_wanted and self._retries.is_quiet
            if self._is_time_to_hand_over():
                self._stop.set()
            pauses = bool(batches) and events < MANY_EVENTS and not self._is_exactly_once
            # Variables would keep their content in memory until there are others.
            batch = None
            batches.clear()
            ticks.clear()
            if pauses:
                self._end.wait(_SETTLE_PAUSE)

    def _settle_ticks(
        self, position: Position, ticks: list[Complete], *, tick_id: str | None, last: bool
    ) -> int:
        """Moves the position over these, and puts aside what is held back; how many events Kafka has."""
        held = [(batch, rows) for batch in ticks if (rows := batch.aside())]
        parked = sum(len(rows) for _, rows in held)
        aside = [rows for batch, rows in held if not batch.is_in_table]
        events = sum(len(batch.piece.events) for batch in ticks) - parked
        newest = max((batch.piece.events[-1].seq for batch in ticks if batch.piece.events), default=None)
        begun = time.monotonic()
        settled = self._shard.settle(position, events, newest, parked=aside, tick_id=tick_id, last=last)
        self._metrics.settled(events, time.monotonic() - begun, settled)
        self.totals.events += events
        if settled is not None:
            self._settled.append(settled)
        if parked:
            for batch in ticks:
                self._lot.parked(batch.held())
                for event, why in batch.dead.values():
                    self._on_dead_letter(DeadLetter(event, 0, why))
        return events

    def _rest(self, beat_at: float) -> float:
        """How long the settler may sleep."""
        until_beat = beat_at + self._heartbeat - time.monotonic()
        # With Kafka away nothing is tried, however due it is.
        pause = self._retries.pause if self._may_try() else self._heartbeat
        if self._hold.is_wanted:
            pause = CHANGE_POLL
        return max(0.0, min(until_beat, pause))

    def _may_try(self) -> bool:
        away = self._publisher.breaker.state is not State.CLOSED
        return not (away or self._stop.is_set() or self._hold.is_wanted)

    def _tell(self) -> None:
        """What people should see in the database, when it has changed."""
        breaker = self._publisher.breaker
        if breaker.state is not self._shown:
            self._shown = breaker.state
            self._metrics.breaker(breaker.state)
            self._shard.show_breaker(breaker.state.value, breaker.reason)
            if breaker.state is State.OPEN:
                _LOG.warning("Kafka is away: %s", breaker.reason)
            elif breaker.state is State.CLOSED:
                _LOG.warning("Kafka is back")
        if self._caution.is_over:
            self._caution.is_over = False
            self._shard.calm()

    def _has_work(self) -> bool:
        # A position without events can wait for the heartbeat: settling it takes a transaction id, which
        # would make the next snapshot differ, and so on for ever.
        return bool(self._finished or self._orders or any(batch.piece.events for batch in self._completed))

    def _hand_to_settler(self, batches: list[Complete]) -> None:
        if batches:
            self._metrics.acknowledged(batches)
            with self._outcome:
                self._completed += batches
                self._unsettled += sum(1 for batch in batches if batch.piece.events)
                self._unsettled_bytes += sum(batch.piece.size for batch in batches)
                self._outcome.notify()

    def _is_time_to_hand_over(self) -> bool:
        return (
            self._hand_over_after is not None
            and time.monotonic() - self._started >= self._hand_over_after
            # Without a successor it goes on: whoever starts them may be dead.
            and self._shard.is_awaited()
        )

    def _report(self) -> None:
        while self._settled:
            # Here, once a second or so: the publisher's are this thread's.
            self._on_progress(replace(self._settled.popleft(), topics=self._publisher.topics))

    def _ending(self) -> bool:
        return self._stop.is_set() or self._end.is_set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._end.set()

    def _thread(self, body: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except psycopg.OperationalError as error:
                self._fail(ShardLostError(f"the database has gone: {error}"))
            except BaseException as error:  # noqa: BLE001 - raised by run()
                self._fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread


@dataclass(slots=True)
class _Order:
    """What the settler is to write for the publishing thread."""

    position: Position | None = None
    tick_id: str | None = None
    parked: list[Parked] = field(default_factory=list)
    is_done: bool = False
