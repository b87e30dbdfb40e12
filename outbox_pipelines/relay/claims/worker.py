"""The relay of an existing table: claim → encode → publish → mark, in two threads.

Invariants:
- One thread claims, marks, and looks after what was refused; the calling thread publishes. A third only keeps
  the sessions alive, so that a slow statement costs nobody the table.
- Claims are published in the order in which they were made, and settled in that order.
- The first failure anywhere ends all, and is raised to the caller. What was on its way is pending again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import psycopg

from outbox_pipelines.errors import AwayError
from outbox_pipelines.event import Piece
from outbox_pipelines.relay.claims import queries
from outbox_pipelines.relay.claims.holder import Holder
from outbox_pipelines.relay.claims.marks import MarkError
from outbox_pipelines.relay.claims.retries import ClaimRetries
from outbox_pipelines.relay.claims.source import ClaimSource, names
from outbox_pipelines.relay.core.attempts import DeadLetter
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.core.errors import ShardLostError
from outbox_pipelines.relay.core.parking import ParkingLot
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.metrics import Metrics
from outbox_pipelines.relay.producer import IdempotentProducer
from outbox_pipelines.relay.shards import Settled
from outbox_pipelines.relay.worker import Totals
from outbox_pipelines.settings import Settings

# How long a graceful stop waits for acknowledgements: an outage must not hold it up for ever.
_STOP_SECONDS: Final = 10.0
# How long a run until empty waits for a Kafka that is away.
_OUTAGE_SECONDS: Final = 60.0
# Polling: fast for a second after the last event.
_FAST_POLL: Final = 0.002
_SLOW_POLL: Final = 0.025
_FAST_FOR: Final = 1.0
_REPORT_POLL: Final = 0.001
# With nothing to publish, the publishing thread waits for a claim, and serves Kafka's client this often.
_IDLE_POLL: Final = 0.2
_PROGRESS_EVERY: Final = 1.0


class ClaimWorker:
    """Relays a table that has been taken, until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        holder: Holder,
        producer: IdempotentProducer,
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
        self._metrics = metrics or Metrics()
        self._settings = settings
        self._holder = holder
        self._producer = producer
        self._publisher = publisher
        self._lot = lot
        self._stop = stop
        self._until_empty = until_empty
        self._hand_over_after = hand_over_after
        self._on_progress = on_progress or (lambda settled: None)
        self._source = ClaimSource(settings, holder)
        self._retries = ClaimRetries(
            settings,
            holder,
            self._source,
            lot,
            topics=producer.lookups,
            on_dead_letter=on_dead_letter or (lambda dead_letter: None),
        )
        self._started = time.monotonic()
        self._end = threading.Event()
        self._failure: BaseException | None = None
        self._broken: MarkError | None = None
        """Rows cannot be marked: each that is published would be published again."""
        # Both under the condition, which each thread is woken by.
        self._change = threading.Condition()
        self._claimed: deque[Piece] = deque()
        self._completed: deque[Complete] = deque()
        self._claiming = True
        self._finished = False
        self._active_at = 0.0
        self._stop_by = math.inf
        self._away_since: float | None = None
        self._shown = State.CLOSED
        self._progress_at = 0.0
        self._progress: deque[int] = deque()
        self.totals = Totals()

    def run(self) -> Totals:
        """Relays; returns once all that was claimed is published or put back, and settled.

        Raises:
            ShardLostError: the table or the database is gone.
            MarkError: the table does not let published rows be marked.
            AwayError: with `until_empty`, Kafka has been away for too long.
        """
        threads: list[threading.Thread] = []
        try:
            self._source.rehearse()
            self._retries.begin()
            threads = [self._thread(self._claim, "outbox-claims"), self._thread(self._beat, "outbox-beat")]
            self._publish()
        except BaseException as error:  # noqa: BLE001 - raised below, when the threads have ended
            self._fail(error)
        finally:
            with self._change:
                self._finished = True
                self._change.notify_all()
            if threads:
                threads[0].join()
            self._retries.close()
            self._publisher.discard()
            # The heartbeats end last: until here Kafka's client may still send.
            self._end.set()
            for thread in threads:
                thread.join()
            self._source.close()
        self._report(last=True)
        self.totals.events += self._retries.published
        self.totals.seconds = time.monotonic() - self._started
        if self._failure is not None:
            raise self._failure
        if self._broken is not None:
            raise self._broken
        self._count_held()
        return self.totals

    # --- the calling thread ---

    def _publish(self) -> None:
        while self._failure is None and not self._is_done():
            room = self._publisher.has_room
            if room and self._claimed and self._broken is None:
                self._publisher.publish(self._claimed.popleft())
            elif room and not self._publisher.pending:
                self._publisher.poll(0.0, linger=False)
                with self._change:
                    self._change.wait_for(self._is_awaited, timeout=_IDLE_POLL)
            else:
                self._publisher.poll(_REPORT_POLL if room else 0.05, linger=not room)
            if completed := self._publisher.acknowledged():
                self._metrics.acknowledged(completed)
                with self._change:
                    self._completed += completed
                    self._change.notify_all()
            self._report()

    def _is_awaited(self) -> bool:
        """Whether the publishing thread has something to do."""
        return self._is_to_publish() or not self._claiming or self._failure is not None

    def _is_done(self) -> bool:
        if self._stop.is_set():
            # What is on its way may finish; what was refused waits for the next relay.
            self._stop_by = min(self._stop_by, time.monotonic() + _STOP_SECONDS)
            is_over = self._publisher.breaker.state is State.OPEN or time.monotonic() > self._stop_by
            return is_over or not (self._claiming or self._is_to_publish() or self._publisher.pending)
        if self._until_empty:
            self._check_outage()
        return not (self._claiming or self._is_to_publish() or self._publisher.pending)

    def _is_to_publish(self) -> bool:
        return bool(self._claimed) and self._broken is None

    def _check_outage(self) -> None:
        """A run until empty is awaited by somebody: it does not wait for ever."""
        breaker = self._publisher.breaker
        if breaker.state is State.CLOSED:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()
        elif time.monotonic() - self._away_since > _OUTAGE_SECONDS:
            raise AwayError(f"Kafka has taken nothing for {_OUTAGE_SECONDS:.0f} s: {breaker.reason}")

    def _report(self, *, last: bool = False) -> None:
        if self._progress and (last or time.monotonic() - self._progress_at >= _PROGRESS_EVERY):
            events = sum(self._progress.popleft() for _ in range(len(self._progress)))
            self._progress_at = time.monotonic()
            self._on_progress(Settled(events, None, self._producer.topics))

    # --- the claiming thread ---

    def _claim(self) -> None:
        if self._until_empty:
            self._source.stop_at_now()
        while True:
            finished = self._finished
            self._settle()
            self._retries.look_after(may_try=self._may_try())
            self._source.let_go()
            self._tell()
            if finished or self._failure is not None:
                return
            if self._is_time_to_hand_over():
                self._stop.set()
            if self._claiming and self._stop.is_set():
                self._stop_claiming()
            if not (self._claiming and self._source.may_claim and self._claim_one()):
                with self._change:
                    self._change.wait_for(lambda: self._completed or self._finished, timeout=self._rest())

    def _claim_one(self) -> bool:
        """Claims, if there is something to be claimed."""
        claim = self._source.claim(list(self._lot.blocked))
        if claim is not None:
            self._active_at = time.monotonic()
            with self._change:
                self._claimed.append(claim.piece)
                self._change.notify_all()
        elif self._until_empty and self._is_empty():
            self._stop_claiming()
        return claim is not None

    def _is_empty(self) -> bool:
        """Whether a claim that found nothing means that there is nothing left."""
        is_ours = not self._source.in_flight and not self._source.was_locked_out
        return is_ours and self._retries.is_settled

    def _settle(self) -> None:
        while self._completed:
            complete = self._completed.popleft()
            claim = self._source.in_flight[0]
            assert claim.piece is complete.piece, "claims are settled in order"
            published = complete.published()
            try:
                self._source.settle(claim, published)
            except MarkError as error:
                self._break_off(error)
            self._retries.settled(complete)
            self.totals.events += len(published)
            self._progress.append(len(published))

    def _break_off(self, error: MarkError) -> None:
        """Publishes nothing more; what is in flight is awaited, and marked as far as the table lets it be."""
        with self._change:
            self._broken = self._broken or error
        self._stop_claiming()

    def _stop_claiming(self) -> None:
        with self._change:
            self._claiming = False
            self._change.notify_all()

    def _rest(self) -> float:
        """How long the claiming thread may sleep."""
        poll = _FAST_POLL if time.monotonic() - self._active_at < _FAST_FOR else _SLOW_POLL
        if not (self._claiming and self._source.may_claim):
            poll = _IDLE_POLL
        # With Kafka away nothing is tried, however due it is.
        return min(poll, self._retries.pause) if self._may_try() else poll

    def _may_try(self) -> bool:
        is_closed = self._publisher.breaker.state is State.CLOSED
        return is_closed and not self._stop.is_set() and self._broken is None

    def _tell(self) -> None:
        """What people should see in the database, when it has changed."""
        breaker = self._publisher.breaker
        if breaker.state is not self._shown:
            self._shown = breaker.state
            self._metrics.breaker(breaker.state)
            self._holder.show_kafka(breaker)

    def _is_time_to_hand_over(self) -> bool:
        return (
            self._hand_over_after is not None
            and time.monotonic() - self._started >= self._hand_over_after
            and not self._stop.is_set()
            # Without a successor it goes on: whoever starts them may be dead.
            and self._holder.is_awaited()
        )

    def _count_held(self) -> None:
        """Those that wait, for whoever waits for a run until empty; the given up ones too."""
        self.totals.held = self._retries.dead
        if self._until_empty and self._lot.blocked:
            query = self._holder.statements(queries.HELD, queries.AMONG, queries.UP_TO)
            parameters = names(self._lot.blocked) | {"upto": self._source.upto}
            ((held,),) = self._holder.execute(query, parameters)
            self.totals.held += held

    # --- all ---

    def _beat(self) -> None:
        while not self._end.wait(self._settings.lease_seconds / 5):
            self._holder.beat()
            self._source.beat()

    def _fail(self, error: BaseException) -> None:
        with self._change:
            self._failure = self._failure or error
            self._change.notify_all()

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
