"""Publishes pieces in Kafka transactions: exactly once, for consumers that read committed messages only.

Invariants:
- A tick is opened in the database, with an id of its own, before anything of it is published; a transaction
  holds pieces of one tick, and the record of how far it is.
- What is parked is in the database before the transaction that passes over it is committed.
- A younger relay with the same transactional id fences this one. Every outcome that is not plain goes through
  one routine: start over, and read Kafka's record.
- A batch is complete when its transaction is committed, and none joins a transaction whose commit has begun.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_pipelines.errors import AwayError, SetupError
from outbox_pipelines.event import Piece, Released
from outbox_pipelines.relay import client, progress
from outbox_pipelines.relay.breaker import State
from outbox_pipelines.relay.delivery import Complete, Delivery, IncompleteError
from outbox_pipelines.relay.parking import ParkingLot
from outbox_pipelines.relay.position import Position
from outbox_pipelines.relay.publisher import Publisher
from outbox_pipelines.relay.shards import Shard, ShardLostError
from outbox_pipelines.settings import Settings

# A transaction ends when it holds so much, or is so old, or when there is nothing more to put into it.
_EVENTS: Final = 40_000
_CHARACTERS: Final = 24_000_000
_SECONDS: Final = 0.25
_INIT_SECONDS: Final = 30.0
# One try at a commit; it is called again until it answers.
_COMMIT_SECONDS: Final = 1.0
_ABORT_SECONDS: Final = 10.0
_LAST_REPORTS_SECONDS: Final = 5.0
# What no waiting changes, and what a person can do about it.
_ADVICE: Final = {
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        "OUTBOX_TRANSACTION_SECONDS={seconds:g} is more than the broker allows: set it lower, "
        "or raise transaction.max.timeout.ms of the broker"
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "grant WRITE and DESCRIBE on the transactional id {id!r}, or on its prefix outbox-"
    ),
}
_LOG = logging.getLogger(__name__)


class Ledger(Protocol):
    """What the database must hold before Kafka may go on."""

    def open_tick(self, position: Position | None, tick_id: str) -> None:
        """Settles all that is complete, and opens a tick (None: at the position of now); returns when that is
        committed."""

    def park(self, deliveries: list[Delivery]) -> None:
        """Puts aside what these hold back; returns when that is committed."""

    def settle_all(self) -> None:
        """Returns when all that is complete is settled."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard's transactions and their records are."""

    transactional_id: str
    topic: str
    shard: int


def place(settings: Settings, shard: Shard) -> Place:
    """Of this database, schema and shard: no other outbox of the cluster may share it."""
    return Place(
        transactional_id=f"outbox-{shard.identity}-{shard.shard}",
        topic=f"outbox-progress-{shard.identity}",
        shard=shard.shard,
    )


def recover(settings: Settings, shard: Shard, on_error: Callable[[KafkaError], None]) -> Producer:
    """Fences every predecessor, then moves the position to where Kafka says that the tick is.

    Raises:
        ShardLostError: somebody has taken the shard meanwhile.
        AwayError: Kafka does not answer.
        SetupError: the progress topic cannot be made.
    """
    where = place(settings, shard)
    progress.create_topic(settings, where.topic, shard.shards)
    producer = begin(settings, where, on_error)
    if not shard.is_held():
        raise ShardLostError(f"another relay has taken shard {shard.shard}")
    last = progress.read_last(settings, where.topic, where.shard)
    if last is not None and last.tick == shard.tick_id:
        _believe(shard, last)
    return producer


def begin(settings: Settings, where: Place, on_error: Callable[[KafkaError], None], **own: Any) -> Producer:
    """A producer that can begin transactions; from here on every older one of that name is fenced.

    Raises:
        AwayError: Kafka does not answer.
        SetupError: the broker never gives this relay a transaction.
    """
    milliseconds = int(settings.transaction_seconds * 1000)
    producer = client.producer(
        settings,
        on_error,
        transactional_id=where.transactional_id,
        transaction_timeout_ms=milliseconds,
        message_timeout_ms=milliseconds,
        # Within a transaction there are no gaps: it is all of it or nothing.
        enable_gapless_guarantee=False,
        **own,
    )
    try:
        producer.init_transactions(_INIT_SECONDS)
    except KafkaException as error:
        reason: KafkaError = error.args[0]
        if (advice := _ADVICE.get(reason.code())) is not None:
            values = {"seconds": settings.transaction_seconds, "id": where.transactional_id}
            raise SetupError(f"exactly_once: {reason.str()}: {advice.format(**values)}") from None
        raise AwayError(f"Kafka gives no transactions: {reason.str()}") from None
    return producer


def _believe(shard: Shard, last: progress.Record) -> None:
    if last.released:
        shard.released(last.released)
    position = shard.position
    if position.target is None:
        return
    if last.finished:
        shard.settle(Position(position.target))
    elif last.last_seq > (position.last_seq or 0):
        shard.settle(Position(position.done, position.target, last.last_seq))


class TransactionalPublisher(Publisher):
    """A publisher whose pieces become visible by transactions.

    Args:
        producer: as `recover` gave it.
    """

    most_events = 2 * _EVENTS
    # The first of them has just been tried alone, and its topic may have been mended.
    doubts_released = False

    def __init__(self, settings: Settings, lot: ParkingLot, shard: Shard, producer: Producer) -> None:
        self._recovered: Producer | None = producer
        self._place = place(settings, shard)
        super().__init__(settings, lot)
        self.ledger: Ledger | None = None
        self._complete: list[Complete] = []
        self._began: float | None = None
        self._committing: list[Delivery] | None = None
        """What the transaction holds whose commit has begun; nothing can join it."""
        self._must_settle = False
        position = shard.position
        self._tick = shard.tick_id
        self._open = None if position.target is None else (position.done, position.target)
        self._last_seq = position.last_seq or 0
        self._is_finished = position.target is None

    def prepare(self, shards: int) -> None:
        """Gives the progress topic a partition for each.

        Raises:
            AwayError: Kafka does not answer.
            SetupError: it may not be changed.
        """
        progress.create_topic(self._settings, self._place.topic, shards)

    def takes(self, piece: Piece | Released) -> bool:
        # A transaction holds batches of one tick, and none that come while it is being committed.
        return self._committing is None and not (self._opens(piece) and self._deliveries)

    def publish(self, piece: Piece | Released) -> None:
        if not self.takes(piece):
            raise RuntimeError("a batch was published that the transaction does not take")
        if self._opens(piece):
            self._open_tick(piece)
        super().publish(piece)
        if self._is_full():
            self._commit()

    def poll(self, seconds: float, *, linger: bool = True) -> None:
        super().poll(seconds, linger=linger)
        if self._began is None or self.breaker.state is State.OPEN:
            return
        is_old = time.monotonic() - self._began >= _SECONDS
        if not linger or self._is_full() or is_old or self._committing is not None:
            self._commit()

    def acknowledged(self) -> list[Complete]:
        # Outside of a transaction only what is parked or empty is complete.
        while self._began is None and self._deliveries and self._deliveries[0].is_complete:
            self._complete.append(self._deliveries.popleft().complete())
        complete, self._complete = self._complete, []
        for batch in complete:
            self._count_out(batch)
        return complete

    def discard(self) -> None:
        if self._began is not None:
            self._producer.purge()
            # With Kafka unavailable it would only delay the stop until a manager kills the process.
            seconds = 1.0 if self.breaker.state is State.OPEN else _ABORT_SECONDS
            try:
                self._producer.abort_transaction(seconds)
            except KafkaException as error:
                # The successor's `init_transactions` ends it, or the broker after transaction_seconds.
                _LOG.info("a transaction is left to the broker: %s", error.args[0].str())
        super().discard()

    def _is_full(self) -> bool:
        return self._pending_events >= _EVENTS or self._pending_size >= _CHARACTERS

    def _opens(self, piece: Piece | Released) -> bool:
        """Whether a tick must be opened for it first."""
        if isinstance(piece, Released):
            return self._tick is None
        return bool(piece.events) and (self._tick is None or self._open != (piece.done, piece.target))

    def _open_tick(self, piece: Piece | Released) -> None:
        assert self.ledger is not None
        self._tick = str(uuid4())
        if isinstance(piece, Released):
            self.ledger.open_tick(None, self._tick)
            return
        if self._open != (piece.done, piece.target):
            self._open, self._last_seq = (piece.done, piece.target), 0
        self._is_finished = False
        self.ledger.open_tick(Position(piece.done, piece.target, self._last_seq), self._tick)

    def _pump(self, deliveries: Iterable[Delivery]) -> None:
        if self._began is None and any(delivery.unsent for delivery in deliveries):
            if self._batches.is_outdated:
                self._producer = self._new_producer()
            self._producer.begin_transaction()
            self._began = time.monotonic()
        super()._pump(deliveries)

    def _commit(self) -> None:
        """One try; called again while Kafka does not answer."""
        if self._committing is None:
            if any(delivery.unsent for delivery in self._deliveries):
                return
            try:
                self._committing = self._prepare()
            except (BufferError, KafkaException) as error:
                self._trouble = str(error)
                self._recover()
                return
        elif any(delivery.failed for delivery in self._deliveries):
            # Behind a refused batch nothing of its partition is sent: the commit would wait for ever.
            self._producer.purge()
        try:
            self._producer.commit_transaction(_COMMIT_SECONDS)
        except KafkaException as error:
            reason: KafkaError = error.args[0]
            self._trouble = reason.str()
            if reason.fatal() or not (reason.retriable() or reason.txn_requires_abort()):
                raise ShardLostError(f"a transaction ended in doubt: {reason.str()}") from None
            if reason.txn_requires_abort():
                self._committing = None
                self._recover()
            return
        try:
            self._complete += [delivery.complete() for delivery in self._committing]
        except IncompleteError as error:
            raise ShardLostError(f"Kafka's client did not say what became of each event: {error}") from None
        self._must_settle = any(isinstance(delivery.piece, Released) for delivery in self._committing)
        for delivery in self._committing:
            self._deliveries.remove(delivery)
        self._began, self._committing, self._unexplained = None, None, 0
        self.breaker.acknowledged()

    def _prepare(self) -> list[Delivery]:
        """Write what must be in database and transaction before its commit; return what it holds."""
        assert self.ledger is not None
        assert self._tick is not None
        content = list(self._deliveries)
        held = [d for d in content if isinstance(d.piece, Piece) and not d.is_in_table]
        if held:
            self.ledger.park(held)
            for delivery in held:
                delivery.in_table = len(delivery.held())
        if self._must_settle:
            # The record names what was released by its own transaction alone.
            self.ledger.settle_all()
            self._must_settle = False
        released: list[int] = []
        for delivery in content:
            piece = delivery.piece
            if isinstance(piece, Released):
                aside = delivery.aside()
                released += [event.seq for event in piece.events if event.seq not in aside]
            elif piece.ends_tick:
                self._is_finished = True
            elif piece.events:
                self._last_seq = piece.events[-1].seq
        record = progress.Record(self._tick, self._last_seq, self._is_finished, released)
        self._producer.produce(
            self._place.topic, record.encode(), str(self._place.shard), partition=self._place.shard
        )
        return content

    def _recover(self) -> None:
        """After a refusal nothing of the transaction is out: all of it again, without those to blame."""
        if self._committing is not None:
            # Kafka's client takes no other call until that commit has failed.
            self._commit()
            return
        self._await_reports()
        explained = self._blame(
            [(one, *what) for one in self._deliveries for what in self._identify(one.flying, one.failed)]
        )
        self._abort()
        # The transaction after a refusal is often aborted once more, for its sequence numbers.
        self._conclude(explained, f"Kafka aborts every transaction: {self._trouble}")

    def _abort(self) -> None:
        self._producer.purge()
        try:
            self._producer.abort_transaction(_ABORT_SECONDS)
        except KafkaException as error:
            raise ShardLostError(f"a transaction ended in doubt: {error.args[0].str()}") from None
        self.flush(_LAST_REPORTS_SECONDS)
        if len(self._producer):
            # A report that comes after `restart` would count for the next transaction.
            raise ShardLostError("Kafka's client did not report each event of an aborted transaction")
        self._began, self._committing, self._failed = None, None, False
        for delivery in self._deliveries:
            delivery.restart()

    def _renew(self) -> bool:
        if not self._batches.must_shrink:
            # Larger batches can wait for the next transaction.
            return True
        if self._began is not None:
            self._abort()
        self._producer = self._new_producer()
        # All of the transaction is to be sent again, the oldest first: `poll` does.
        return False

    def _new_producer(self) -> Producer:
        if self._recovered is not None and not self._batches.is_outdated:
            producer, self._recovered = self._recovered, None
            return producer
        self._batches.current = self._batches.wanted
        return begin(self._settings, self._place, self._on_error, batch_size=self._batches.current)
