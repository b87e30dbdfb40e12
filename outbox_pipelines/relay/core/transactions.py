"""exactly_once: batches become visible by transactions, each with a record of the shard's position.

Invariants:
- A tick is open in the database, with its id, before a transaction with events of it commits; Kafka's record
  is believed only if the row has the same tick id.
- Released events are deleted before the next tick is opened, or the next transaction with a record is
  committed: from then on the record that names them is ignored, or is not the last.
- The events that a transaction does not send are parked in the table before its commit begins.
- The record is written when every event of its transaction is acknowledged, and nothing joins afterwards:
  whatever ends the transaction early, no record is visible without its events.
- Requests of a transaction that was aborted, or committed by more than one request, may still arrive and end
  the next one. A new producer comes first, whose start makes Kafka refuse them; and since it would also fence
  a successor, the database must confirm afterwards that the shard is still owned.
- After a refusal nothing of the transaction is visible: all of it is sent again, without the refused events.
  A transaction in doubt ends the relay: the next one reads the record.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from outbox_pipelines.core.position import Position
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.core.batch import Batch, ReleasedBatch
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.delivery import Complete, Delivery, IncompleteError
from outbox_pipelines.relay.core.outcomes import Cause, ShardLostError
from outbox_pipelines.relay.core.producers import Clock, CommitAnswer, TransactionalProducer
from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.transaction_size import MOST_EVENTS, TransactionSize

# A transaction ends when it is full or so old, or when there is nothing more to put into it.
_SECONDS: Final = 0.25
# While nothing can join, and reports are awaited: a shorter wait would wake this thread and the client's.
_FLUSH_SECONDS: Final = 0.05
_ABORT_SECONDS: Final = 10.0
_LAST_REPORTS_SECONDS: Final = 5.0


class Phase(Enum):
    """The phase of a transaction."""

    NONE = "none"
    OPEN = "open"
    FLUSHING = "flushing"
    COMMITTING = "committing"


TRANSITIONS: Final[dict[tuple[Phase, str], Phase]] = {
    (Phase.NONE, "events to send"): Phase.OPEN,
    (Phase.OPEN, "full, old, or nothing to add"): Phase.FLUSHING,
    (Phase.OPEN, "aborted after a refusal, or for smaller batches"): Phase.NONE,
    (Phase.FLUSHING, "all is acknowledged: the record is written"): Phase.COMMITTING,
    (Phase.FLUSHING, "aborted after a refusal, or for smaller batches"): Phase.NONE,
    (Phase.COMMITTING, "no answer: asked again"): Phase.COMMITTING,
    (Phase.COMMITTING, "committed"): Phase.NONE,
    (Phase.COMMITTING, "refused"): Phase.OPEN,
}
"""Every change of phase, by its cause. In doubt, or fenced, the relay ends in any of them."""


class SettleRequests(Protocol):
    """Requests for what must be in the database before the transaction continues."""

    def open_tick(self, position: Position | None, tick_id: str) -> None:
        """Request that everything complete is settled and a tick opened (None: at the current position)."""

    def await_tick(self) -> None:
        """Return when the tick is open in the database."""

    def park(self, deliveries: list[Delivery]) -> None:
        """Park the events of these deliveries that are not sent; return after the commit."""

    def settle_all(self) -> None:
        """Return when everything complete is settled, and the shard is still owned."""


class TransactionalPublisher(Publisher):
    """A publisher whose batches become visible by transactions.

    Args:
        producer: which has fenced all before it.
        position: of the shard.
        tick_id: of the current or the last tick; None if there was none.
        new_id: makes the id of a tick, unlike any other.
        timeout: seconds that a transaction may take.
    """

    most_events = 2 * MOST_EVENTS

    def __init__(
        self,
        producer: TransactionalProducer,
        blocked: BlockedAggregates,
        position: Position,
        tick_id: str | None,
        *,
        patience: float,
        clock: Clock,
        new_id: Callable[[], str],
        timeout: float = 10.0,
    ) -> None:
        super().__init__(producer, blocked, patience=patience, clock=clock)
        self._transactions = producer
        self._new_id = new_id
        self.requests: SettleRequests | None = None
        self._complete: list[Complete] = []
        self._phase = Phase.NONE
        self._size = TransactionSize(timeout)
        self._began = 0.0
        self._committing: list[Delivery] = []
        """What the transaction holds whose commit has begun; nothing can join it."""
        self._must_settle = False
        self._must_replace = False
        """Whether requests of this producer may arrive late."""
        self._tick = tick_id
        self._open = None if position.target is None else (position.done, position.target)
        self._last_seq = position.last_seq or 0
        self._is_finished = position.target is None

    def takes(self, batch: Batch | ReleasedBatch) -> bool:
        # A transaction holds batches of one tick, and none that come while it is flushed or committed.
        may_join = self._phase in (Phase.NONE, Phase.OPEN)
        return may_join and not (self._opens(batch) and self._deliveries)

    def portion(self, batch: Batch) -> int:
        # Only the order of `seq` has a position between two events.
        if batch.in_commit_order or not self._size.is_full(len(batch.events), batch.size):
            return len(batch.events)
        size = max(1, batch.size)
        return max(1, min(self._size.events, len(batch.events) * self._size.bytes // size))

    def await_turn(self) -> None:
        if self._phase is Phase.NONE:
            self._transactions.await_end()

    def publish(self, batch: Batch | ReleasedBatch) -> None:
        if not self.takes(batch):
            raise RuntimeError("a batch was published that the transaction does not take")
        if self._opens(batch):
            self._open_tick(batch)
        super().publish(batch)
        if self._is_full():
            self._flush()

    def poll(self, seconds: float, *, linger: bool = True) -> None:
        is_old = self._clock() - self._began >= _SECONDS
        if self.breaker.state is not State.OPEN and (not linger or self._is_full() or is_old):
            self._flush()
        is_flushing = self._phase is Phase.FLUSHING
        if is_flushing and self._producer.in_flight:
            seconds = _FLUSH_SECONDS
        super().poll(seconds, linger=linger and not is_flushing)
        if self._phase is Phase.NONE or self.breaker.state is State.OPEN:
            return
        if self._phase is Phase.COMMITTING or (
            self._phase is Phase.FLUSHING and not self._producer.in_flight
        ):
            self._commit()

    def acknowledged(self) -> list[Complete]:
        # Outside of a transaction only what is parked or empty is complete.
        while self._phase is Phase.NONE and self._deliveries and self._deliveries[0].is_complete:
            # The position cannot move within a tick that is not open yet.
            assert self.requests is not None
            self.requests.await_tick()
            outside = self._deliveries.popleft().complete()
            # The record of the next transaction covers its parked events.
            self._must_settle |= bool(outside.parked)
            self._complete.append(outside)
        complete, self._complete = self._complete, []
        for batch in complete:
            self._count_out(batch)
        return complete

    def discard(self) -> None:
        if self._phase is not Phase.NONE:
            self._producer.purge()
            # With Kafka unavailable it would only delay the stop until a manager kills the process. What is
            # left, the successor's fencing ends, or the broker after transaction_seconds.
            self._transactions.abort(1.0 if self.breaker.state is State.OPEN else _ABORT_SECONDS)
        super().discard()

    def _go(self, why: str) -> None:
        self._phase = TRANSITIONS[self._phase, why]

    def _is_full(self) -> bool:
        return self._size.is_full(self._pending_events, self._pending_size)

    @property
    def _acknowledged(self) -> int:
        # Batches stay here until all of them are committed.
        return sum(delivery.acknowledged for delivery in self._deliveries)

    def _opens(self, batch: Batch | ReleasedBatch) -> bool:
        """Whether a tick must be opened for it first."""
        if isinstance(batch, ReleasedBatch):
            return self._tick is None
        return bool(batch.events) and (self._tick is None or self._open != (batch.done, batch.target))

    def _open_tick(self, batch: Batch | ReleasedBatch) -> None:
        assert self.requests is not None
        self._tick = self._new_id()
        if isinstance(batch, ReleasedBatch):
            self.requests.open_tick(None, self._tick)
            return
        if self._open != (batch.done, batch.target):
            self._open, self._last_seq = (batch.done, batch.target), 0
        self._is_finished = False
        self.requests.open_tick(Position(batch.done, batch.target, self._last_seq), self._tick)

    def _pump(self) -> None:
        if self._phase is Phase.NONE and any(delivery.unsent for delivery in self._deliveries):
            if (self._must_replace or self._producer.is_outdated) and not self._replace():
                return
            self._transactions.begin()
            self._go("events to send")
            self._began = self._clock()
        super()._pump()

    def _replace(self) -> bool:
        """Take a new producer, which fences the old one; return False while Kafka does not give one."""
        try:
            self._producer.replace()
        except UnavailableError as error:
            self.breaker.trip(self._clock(), str(error))
            return False
        # A relay that has lost the shard has just fenced its successor.
        assert self.requests is not None
        self.requests.settle_all()
        self._must_replace = self._must_settle = False
        return True

    def _flush(self) -> None:
        """Let nothing more join, if all that has joined is handed over."""
        if self._phase is Phase.OPEN and not any(delivery.unsent for delivery in self._deliveries):
            self._go("full, old, or nothing to add")

    def _commit(self) -> None:
        """One try; called again while Kafka does not answer."""
        if self._phase is Phase.FLUSHING:
            if problem := self._prepare():
                self._producer.trouble = problem
                self._recover()
                return
        elif any(delivery.failed for delivery in self._deliveries):
            # After a refused batch nothing more of its partition is sent: the commit would never end.
            self._producer.purge()
        answer = self._transactions.commit()
        self._must_replace |= answer is not CommitAnswer.DONE
        if answer is CommitAnswer.NONE:
            self._go("no answer: asked again")
        elif answer is CommitAnswer.REFUSED:
            self._go("refused")
            self._committing = []
            self._recover()
        else:
            self._committed()

    def _committed(self) -> None:
        try:
            self._complete += [delivery.complete() for delivery in self._committing]
        except IncompleteError as error:
            raise ShardLostError(f"Kafka's client did not say what became of each event: {error}") from None
        content = [delivery.batch for delivery in self._committing]
        self._must_settle = any(isinstance(batch, ReleasedBatch) for batch in content)
        events, size = sum(len(batch.events) for batch in content), sum(batch.size for batch in content)
        self._size.committed(events, size, self._clock() - self._began)
        for delivery in self._committing:
            self._deliveries.remove(delivery)
        self._go("committed")
        self._committing, self._unexplained = [], 0
        self.breaker.acknowledged()

    def _prepare(self) -> str | None:
        """Write what must be in database and transaction before its commit, which has begun then.

        Returns why Kafka's client does not take the record.
        """
        assert self.requests is not None
        assert self._tick is not None
        # Opened while events of it were sent: a transaction that does not commit has no effect.
        self.requests.await_tick()
        content = list(self._deliveries)
        parked = [d for d in content if isinstance(d.batch, Batch) and not d.is_in_table]
        if parked:
            self.requests.park(parked)
            for delivery in parked:
                delivery.in_table = len(delivery.parked)
        if self._must_settle:
            # The record names what was released by its own transaction alone.
            self.requests.settle_all()
            self._must_settle = False
        released: list[int] = []
        for delivery in content:
            batch = delivery.batch
            if isinstance(batch, ReleasedBatch):
                released += [event.seq for event in batch.events if event.seq not in delivery.parked]
            elif batch.ends_tick:
                self._is_finished = True
            elif batch.events:
                self._last_seq = batch.events[-1].seq
        problem = self._transactions.record(
            self._tick, self._last_seq, finished=self._is_finished, released=released
        )
        if problem is None:
            self._committing = content
            self._go("all is acknowledged: the record is written")
        return problem

    def _recover(self) -> None:
        """After a refusal, abort the transaction and send all of it again, without the refused events."""
        if self._phase is Phase.COMMITTING:
            # Kafka's client takes no other call until that commit has failed.
            self._commit()
            return
        self._producer.await_reports()
        failed = [
            (one, *what)
            for one in self._deliveries
            for what in self._producer.identify(one.in_flight, one.failed)
        ]
        explained = self._blame(failed)
        if not explained and any(refusal.cause is Cause.OUTAGE for *_, refusal in failed):
            self._check_throughput()
        self._abort()
        # The transaction after a refusal is often aborted once more, for its sequence numbers.
        self._conclude(explained, f"Kafka aborts every transaction: {self._producer.trouble}")

    def _check_throughput(self) -> None:
        """Start over, with small transactions, if Kafka has taken a part of one until it was too late."""
        if acknowledged := self._acknowledged:
            seconds = self._clock() - self._began
            rate = self._pending_size * acknowledged / self._pending_events / 1000 / max(seconds, 0.001)
            raise ShardLostError(
                f"Kafka acknowledged {acknowledged} of the {self._pending_events} events of a transaction in "
                f"{seconds:.0f} s, {rate:.0f} kB/s: smaller transactions follow. If this repeats, raise "
                "OUTBOX_TRANSACTION_SECONDS, or look for a quota of the broker or a slow network"
            )

    def _abort(self) -> None:
        self._producer.purge()
        if problem := self._transactions.abort(_ABORT_SECONDS):
            # Until the next one has recovered the shard.
            self.breaker.trip(self._clock(), f"a transaction cannot be ended: {problem}")
            raise ShardLostError(f"a transaction ended in doubt: {problem}")
        self._producer.flush(_LAST_REPORTS_SECONDS)
        if self._producer.in_flight:
            # A report that comes after `restart` would count for the next transaction.
            raise ShardLostError("Kafka's client did not report each event of an aborted transaction")
        self._must_replace = True
        self._go("aborted after a refusal, or for smaller batches")
        self._producer.has_failed = False
        for delivery in self._deliveries:
            delivery.restart()

    def _renew(self) -> bool:
        if not self._producer.must_shrink:
            # Larger batches can wait for the next transaction.
            return True
        if self._phase is not Phase.NONE:
            self._abort()
        # All of the transaction is to be sent again, the oldest first, by a new producer: `poll` does.
        return False
