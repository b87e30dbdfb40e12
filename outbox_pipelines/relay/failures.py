"""What Kafka's client reports of a message that was not published, and whose fault it is.

Invariants:
- Every code that a producer can report stands in one table, with the reason why it stands there.
- Only a failure of the kind EVENT ever counts an attempt; and only when the event was sent alone.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from confluent_kafka import KafkaError


class Kind(Enum):
    """Whose fault a failure is."""

    EVENT = "the event's, or that of one in its batch: parked, tried alone, counted"
    TOPIC = "its topic's: parked until the topic is mended, not counted"
    OUTAGE = "nobody's: sent again when it is over"
    CONSEQUENCE = "another event's: sent again"
    OWNER = "another relay has taken over: start over"


_TABLE: Final[dict[int, tuple[Kind, str]]] = {
    KafkaError.MSG_SIZE_TOO_LARGE: (Kind.EVENT, "larger than the topic's max.message.bytes"),
    KafkaError._INVALID_ARG: (Kind.EVENT, "the client cannot make a message of it"),
    KafkaError.RECORD_LIST_TOO_LARGE: (Kind.EVENT, "its batch is larger than a segment of the topic"),
    KafkaError.INVALID_MSG: (Kind.EVENT, "the broker finds it corrupt, after retries"),
    KafkaError.INVALID_MSG_SIZE: (Kind.EVENT, "the broker finds its size impossible"),
    KafkaError.INVALID_RECORD: (Kind.EVENT, "the broker's own validation of records refuses it"),
    KafkaError.INVALID_TIMESTAMP: (Kind.EVENT, "the topic refuses messages of that time"),
    KafkaError.POLICY_VIOLATION: (Kind.EVENT, "a policy of the broker refuses it"),
    KafkaError._BAD_MSG: (Kind.EVENT, "the client finds it malformed"),
    KafkaError._BAD_COMPRESSION: (Kind.EVENT, "it cannot be compressed"),
    KafkaError.UNKNOWN_TOPIC_OR_PART: (Kind.TOPIC, "there is no such topic"),
    KafkaError._UNKNOWN_TOPIC: (Kind.TOPIC, "there is no such topic"),
    KafkaError._UNKNOWN_PARTITION: (Kind.TOPIC, "the topic has fewer partitions than before: made anew"),
    KafkaError.TOPIC_EXCEPTION: (Kind.TOPIC, "the broker refuses the topic's name"),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: (Kind.TOPIC, "no right to write to the topic"),
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: (Kind.TOPIC, "the topic's format is too old for headers"),
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: (Kind.TOPIC, "the topic refuses the compression"),
    KafkaError._PURGE_QUEUE: (Kind.CONSEQUENCE, "not sent yet when the producer was given up"),
    KafkaError._PURGE_INFLIGHT: (Kind.CONSEQUENCE, "on its way when the producer was given up"),
    KafkaError._GAPLESS_GUARANTEE: (Kind.CONSEQUENCE, "behind a refused message of its partition"),
    KafkaError._FATAL: (Kind.CONSEQUENCE, "the producer had failed before"),
    KafkaError._STATE: (Kind.CONSEQUENCE, "the transaction had failed before"),
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: (Kind.CONSEQUENCE, "behind a message that the broker lost"),
    KafkaError.UNKNOWN_PRODUCER_ID: (Kind.CONSEQUENCE, "the broker has forgotten the producer"),
    KafkaError._FENCED: (Kind.OWNER, "a relay with the same transactional.id is younger"),
    KafkaError.PRODUCER_FENCED: (Kind.OWNER, "a relay with the same transactional.id is younger"),
    KafkaError.INVALID_PRODUCER_EPOCH: (Kind.OWNER, "a relay with the same transactional.id is younger"),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: (
        Kind.OUTAGE,
        "no right to write idempotently: no events go",
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (Kind.OUTAGE, "no right to transactions: no events go"),
    KafkaError.KAFKA_STORAGE_ERROR: (Kind.OUTAGE, "the broker's disk"),
    KafkaError._MSG_TIMED_OUT: (Kind.OUTAGE, "no broker took it in time"),
    KafkaError._TRANSPORT: (Kind.OUTAGE, "the connection broke"),
    KafkaError._ALL_BROKERS_DOWN: (Kind.OUTAGE, "no broker is there"),
    KafkaError._TIMED_OUT: (Kind.OUTAGE, "no answer in time"),
}


def kind(error: KafkaError) -> Kind:
    """Whose fault it is.

    A code that nobody knew when the table was written: the broker's word on whether trying again may help
    decides between an outage and the event.
    """
    if error.code() in _TABLE:
        return _TABLE[error.code()][0]
    return Kind.OUTAGE if error.retriable() else Kind.EVENT


def describe(error: KafkaError) -> str:
    """For people: the code's name, and what it means."""
    meaning = _TABLE[error.code()][1] if error.code() in _TABLE else error.str()
    return f"{error.name()}: {meaning}"
