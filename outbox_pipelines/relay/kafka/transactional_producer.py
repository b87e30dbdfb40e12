"""Kafka's client in exactly_once: it fences its predecessors, and resumes the work of the last one.

Invariants:
- The transactional id is derived from database, schema and shard, so that a successor fences its predecessor.
- Kafka's record moves the position only if the row has the same tick id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.producers import CommitAnswer
from outbox_pipelines.relay.core.record import Record, take_up
from outbox_pipelines.relay.kafka import client, progress_topic
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.settings import ProcessSettings, RelaySettings

_INIT_SECONDS: Final = 30.0
# A relay that is asked to stop waits for that.
_REPLACE_SECONDS: Final = 10.0
# One try at a commit; it is called again until it answers.
_COMMIT_SECONDS: Final = 1.0
# Kafka answers a commit before it has ended the transaction in its partitions. A client that begins the next
# one before that is refused, and librdkafka asks again only 20 ms later: one transaction in six at 1,000
# events a second. How long Kafka needs follows from what the commit took.
_ENDING_SHARE: Final = 0.5
_LEAST_ENDING_SECONDS: Final = 0.001
_MOST_ENDING_SECONDS: Final = 0.015
# Most of a short transaction's time does not depend on its events: the scarcer the CPU, the more should come
# together. A long one has many.
_REST_SHARE: Final = 0.25
_LONG_SECONDS: Final = 0.06
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


@dataclass(frozen=True, slots=True)
class KafkaNames:
    """The names of a shard's transactions, and of the topic of their records."""

    transactional_id: str
    topic: str
    shard: int


def kafka_names(shard: Shard) -> KafkaNames:
    """Return the names for this database, schema and shard: no other outbox of the cluster shares them."""
    return KafkaNames(
        transactional_id=f"outbox-{shard.identity}-{shard.shard}",
        topic=f"outbox-progress-{shard.identity}",
        shard=shard.shard,
    )


def recover(
    settings: RelaySettings, shard: Shard, on_error: Callable[[KafkaError], None]
) -> confluent_kafka.Producer:
    """Fence every predecessor, then move the position to the one that Kafka has recorded for the tick.

    Raises:
        ShardLostError: another relay has taken the shard in the meantime.
        UnavailableError: Kafka does not answer.
        SetupError: the progress topic cannot be created.
    """
    where = kafka_names(shard)
    progress_topic.create_topic(settings, where.topic, shard.shards)
    producer = begin(settings, where, on_error)
    if not shard.is_owned():
        raise ShardLostError(f"another relay has taken shard {shard.shard}")
    take_up(shard, progress_topic.read_last(settings, where.topic, where.shard, Record.decode))
    return producer


def options(settings: RelaySettings, transactional_id: str) -> dict[str, Any]:
    """Return what a producer needs for transactions, as `client.producer` takes it."""
    milliseconds = int(settings.transaction_seconds * 1000)
    return {
        "transactional_id": transactional_id,
        "transaction_timeout_ms": milliseconds,
        "message_timeout_ms": milliseconds,
        **client.TRANSACTIONAL,
    }


def begin(
    settings: RelaySettings,
    where: KafkaNames,
    on_error: Callable[[KafkaError], None],
    seconds: float = _INIT_SECONDS,
    **own: Any,
) -> confluent_kafka.Producer:
    """A producer that can begin transactions; from here on every older one of that name is fenced.

    Args:
        seconds: how long Kafka may take.

    Raises:
        UnavailableError: Kafka does not answer.
        SetupError: the broker never gives this relay a transaction.
    """
    producer = client.producer(settings, on_error, **options(settings, where.transactional_id), **own)
    try:
        producer.init_transactions(seconds)
    except KafkaException as error:
        reason: KafkaError = error.args[0]
        if (advice := _ADVICE.get(reason.code())) is not None:
            advice = advice.format(seconds=settings.transaction_seconds, id=where.transactional_id)
            raise SetupError(f"exactly_once: {reason.str()}: {advice}") from None
        raise UnavailableError(f"Kafka does not start transactions: {reason.str()}") from None
    return producer


class TransactionEnds:
    """Commits and aborts the transactions of one producer after another."""

    def __init__(self) -> None:
        self.trouble = ""
        """Why the last commit failed; empty if it did not."""
        self._ended_at = 0.0
        """When Kafka has probably ended the last transaction."""
        self._began_at = 0.0

    def wait(self) -> None:
        """Wait until Kafka has probably ended the last transaction: the next one begins then."""
        now = time.monotonic()
        pause = max(0.0, self._ended_at - now)
        time.sleep(pause)
        self._began_at = now + pause

    def commit(self, producer: confluent_kafka.Producer) -> CommitAnswer:
        """Try to commit.

        Raises:
            ShardLostError: whether it is committed cannot be known, or another process has taken over.
        """
        self.trouble = ""
        asked_at = time.monotonic()
        try:
            producer.commit_transaction(_COMMIT_SECONDS)
        except KafkaException as error:
            reason: KafkaError = error.args[0]
            self.trouble = reason.str()
            if reason.fatal() or not (reason.retriable() or reason.txn_requires_abort()):
                raise ShardLostError(f"a transaction ended in doubt: {reason.str()}") from None
            return CommitAnswer.REFUSED if reason.txn_requires_abort() else CommitAnswer.NONE
        took = self._ends(asked_at)
        return CommitAnswer.DONE if took < client.ASKED_ONCE_SECONDS else CommitAnswer.REPEATED

    def abort(self, producer: confluent_kafka.Producer, seconds: float) -> str | None:
        """Abort the transaction; return the reason of a failure."""
        asked_at = time.monotonic()
        try:
            producer.abort_transaction(seconds)
        except KafkaException as error:
            _LOG.info("a transaction is left to the broker: %s", error.args[0].str())
            return str(error.args[0].str())
        self._ends(asked_at)
        return None

    def _ends(self, asked_at: float) -> float:
        """Record that Kafka is ending a transaction; return the seconds that the request took."""
        now = time.monotonic()
        lasted = now - self._began_at
        rest = _REST_SHARE * lasted if lasted < _LONG_SECONDS else 0.0
        ending = max(_LEAST_ENDING_SECONDS, _ENDING_SHARE * (now - asked_at), rest)
        self._ended_at = now + min(_MOST_ENDING_SECONDS, ending)
        return now - asked_at


class FencingProducer(IdempotentProducer):
    """One transactional producer after another: implements `core.producers.TransactionalProducer`.

    Args:
        first: as `recover` gave it.
    """

    # The first of them has just been tried alone, and its topic may have been corrected.
    doubts_released = False
    # Events that have overtaken a refused event are aborted with it.
    begins_one_by_one = False

    def __init__(self, settings: ProcessSettings, shard: Shard, first: confluent_kafka.Producer) -> None:
        self._first: confluent_kafka.Producer | None = first
        self._kafka_names = kafka_names(shard)
        self._ends = TransactionEnds()
        super().__init__(settings)

    def prepare(self, shards: int) -> None:
        """Give the progress topic a partition for each shard.

        Raises:
            UnavailableError: Kafka does not answer.
            SetupError: it may not be changed.
        """
        progress_topic.create_topic(self._settings, self._kafka_names.topic, shards)

    def refuse_halted(self, waiting: Iterable[Event]) -> bool:
        """Return False: Kafka ends no transaction with an event of such a topic until the topic is whole."""
        return False

    def await_end(self) -> None:
        self._ends.wait()

    def begin(self) -> None:
        self.await_end()
        self._producer.begin_transaction()
        # The record's partition joins the transaction with those of the events: at the commit, that would
        # take a round trip. `record` reports what fails.
        with suppress(BufferError, KafkaException):
            self._record(None)

    def record(self, tick: str, last_seq: int, *, finished: bool, released: list[int]) -> str | None:
        try:
            self._record(Record(tick, last_seq, finished, released).encode())
        except (BufferError, KafkaException) as error:
            return str(error)
        return None

    def _record(self, value: bytes | None) -> None:
        shard = self._kafka_names.shard
        self._producer.produce(self._kafka_names.topic, value, str(shard), partition=shard)

    def commit(self) -> CommitAnswer:
        answer = self._ends.commit(self._producer)
        self.trouble = self._ends.trouble or self.trouble
        return answer

    def abort(self, seconds: float) -> str | None:
        return self._ends.abort(self._producer, seconds)

    def _new(self) -> confluent_kafka.Producer:
        if self._first is not None and not self._batches.is_outdated:
            producer, self._first = self._first, None
            return producer
        # A producer that starts before that is refused, and asks again after half a second.
        self.await_end()
        producer = begin(
            *(self._settings, self._kafka_names, self._on_error, _REPLACE_SECONDS),
            batch_size=self._batches.wanted,
        )
        self._batches.current = self._batches.wanted
        return producer
