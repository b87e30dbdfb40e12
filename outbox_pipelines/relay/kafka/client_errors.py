"""The errors that Kafka's client reports for a message that was not published, and what caused each.

Invariants:
- One table lists every code that a producer can report, with its meaning. Every other code is an outage.
- Only a failure with the cause EVENT counts as an attempt, and only if the event was sent alone.
"""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError

from outbox_pipelines.relay.core.outcomes import Cause, Refusal

# Older clients have no names for these codes.
UNKNOWN_TOPIC_ID: Final = 100
INCONSISTENT_TOPIC_ID: Final = 103
_TRANSACTION_ABORTABLE: Final = 120
_INVALID_DIFFERENT_RECORD: Final = -138

# The known state of the topic is no longer valid.
TOPIC_CHANGED: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        UNKNOWN_TOPIC_ID,
        INCONSISTENT_TOPIC_ID,
    }
)
_TABLE: Final[dict[int, tuple[Cause, str]]] = {
    KafkaError.MSG_SIZE_TOO_LARGE: (Cause.EVENT, "larger than the topic's max.message.bytes"),
    KafkaError.RECORD_LIST_TOO_LARGE: (Cause.EVENT, "its batch is larger than a segment of the topic"),
    KafkaError.INVALID_RECORD: (Cause.EVENT, "the broker's record validation rejects it"),
    KafkaError._INVALID_ARG: (Cause.EVENT, "the client cannot make a message from it"),
    KafkaError.UNKNOWN_TOPIC_OR_PART: (Cause.TOPIC, "the topic does not exist"),
    KafkaError._UNKNOWN_TOPIC: (Cause.TOPIC, "the topic does not exist"),
    KafkaError._UNKNOWN_PARTITION: (Cause.TOPIC, "the topic has fewer partitions than before"),
    UNKNOWN_TOPIC_ID: (Cause.TOPIC, "the topic was deleted and created again"),
    INCONSISTENT_TOPIC_ID: (Cause.TOPIC, "the topic was deleted and created again"),
    KafkaError.TOPIC_EXCEPTION: (Cause.TOPIC, "the broker rejects the topic's name"),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: (
        Cause.TOPIC,
        "not authorized to write to the topic: grant WRITE on it",
    ),
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: (
        Cause.TOPIC,
        "the topic's message format is too old for headers",
    ),
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: (Cause.TOPIC, "the topic does not support the compression type"),
    # The message's time is that of the relay's clock, so no event is the cause.
    KafkaError.INVALID_TIMESTAMP: (
        Cause.TOPIC,
        "the topic rejects the time of the relay's clock: check the clocks, and the topic's "
        "message.timestamp.before.max.ms and message.timestamp.after.max.ms",
    ),
    KafkaError.POLICY_VIOLATION: (Cause.TOPIC, "a policy of the broker rejects it"),
    KafkaError._PURGE_QUEUE: (Cause.CONSEQUENCE, "not sent yet when the producer was discarded"),
    KafkaError._PURGE_INFLIGHT: (Cause.CONSEQUENCE, "in flight when the producer was discarded"),
    KafkaError._GAPLESS_GUARANTEE: (Cause.CONSEQUENCE, "behind a refused message of its partition"),
    _INVALID_DIFFERENT_RECORD: (Cause.CONSEQUENCE, "another record of its batch is invalid"),
    KafkaError._FATAL: (Cause.CONSEQUENCE, "the producer had failed before"),
    KafkaError._STATE: (Cause.CONSEQUENCE, "the transaction had failed before"),
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: (Cause.CONSEQUENCE, "behind a message that the broker lost"),
    KafkaError.DUPLICATE_SEQUENCE_NUMBER: (
        Cause.CONSEQUENCE,
        "the broker has seen its sequence number before",
    ),
    KafkaError.UNKNOWN_PRODUCER_ID: (Cause.CONSEQUENCE, "the broker has forgotten the producer"),
    KafkaError.INVALID_PRODUCER_ID_MAPPING: (
        Cause.CONSEQUENCE,
        "the broker has forgotten the transactional.id",
    ),
    KafkaError.INVALID_TXN_STATE: (Cause.CONSEQUENCE, "the transaction had ended before"),
    _TRANSACTION_ABORTABLE: (Cause.CONSEQUENCE, "the transaction must be aborted"),
    KafkaError._FENCED: (Cause.OWNER, "a newer relay uses the same transactional.id"),
    KafkaError.PRODUCER_FENCED: (Cause.OWNER, "a newer relay uses the same transactional.id"),
    KafkaError.INVALID_PRODUCER_EPOCH: (Cause.OWNER, "a newer relay uses the same transactional.id"),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: (
        Cause.OUTAGE,
        "not authorized to write idempotently: no events are published",
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        Cause.OUTAGE,
        "not authorized to use transactions: no events are published",
    ),
    KafkaError.SASL_AUTHENTICATION_FAILED: (Cause.OUTAGE, "the broker rejects the credentials"),
    KafkaError._AUTHENTICATION: (Cause.OUTAGE, "the broker rejects the credentials"),
    KafkaError._SSL: (Cause.OUTAGE, "the TLS connection to the broker failed"),
    # Java's client also retries these.
    KafkaError.UNKNOWN: (Cause.OUTAGE, "the broker failed without a reason"),
    KafkaError.INVALID_MSG: (Cause.OUTAGE, "the message was damaged in transit to the broker"),
    KafkaError.LEADER_NOT_AVAILABLE: (Cause.OUTAGE, "the partition has no leader"),
    KafkaError.NOT_LEADER_FOR_PARTITION: (Cause.OUTAGE, "the partition has another leader"),
    KafkaError.FENCED_LEADER_EPOCH: (Cause.OUTAGE, "the partition has another leader"),
    KafkaError.UNKNOWN_LEADER_EPOCH: (Cause.OUTAGE, "the partition has another leader"),
    KafkaError.REQUEST_TIMED_OUT: (Cause.OUTAGE, "replicas did not answer the broker in time"),
    KafkaError.BROKER_NOT_AVAILABLE: (Cause.OUTAGE, "the broker is unavailable"),
    KafkaError.REPLICA_NOT_AVAILABLE: (Cause.OUTAGE, "a replica is unavailable"),
    KafkaError.NOT_ENOUGH_REPLICAS: (Cause.OUTAGE, "fewer replicas in sync than min.insync.replicas"),
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND: (
        Cause.OUTAGE,
        "fewer replicas in sync than min.insync.replicas",
    ),
    KafkaError.NETWORK_EXCEPTION: (Cause.OUTAGE, "the broker lost a connection"),
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: (Cause.OUTAGE, "the transaction coordinator is starting"),
    KafkaError.COORDINATOR_NOT_AVAILABLE: (Cause.OUTAGE, "no transaction coordinator"),
    KafkaError.NOT_COORDINATOR: (Cause.OUTAGE, "another broker is the transaction coordinator"),
    KafkaError.CONCURRENT_TRANSACTIONS: (Cause.OUTAGE, "the previous transaction has not ended yet"),
    KafkaError.TRANSACTION_COORDINATOR_FENCED: (
        Cause.OUTAGE,
        "another broker is the transaction coordinator",
    ),
    KafkaError.THROTTLING_QUOTA_EXCEEDED: (Cause.OUTAGE, "a quota of the broker is exhausted"),
    KafkaError.KAFKA_STORAGE_ERROR: (Cause.OUTAGE, "the broker's disk is full or broken"),
    KafkaError.LOG_DIR_NOT_FOUND: (Cause.OUTAGE, "the broker's directory is missing"),
    KafkaError.INVALID_REQUIRED_ACKS: (Cause.OUTAGE, "the broker does not support acks=all"),
    KafkaError.UNSUPPORTED_VERSION: (Cause.OUTAGE, "the broker is too old"),
    KafkaError._BAD_MSG: (Cause.OUTAGE, "the broker's answer is damaged"),
    KafkaError._MSG_TIMED_OUT: (Cause.OUTAGE, "no broker accepted it in time"),
    KafkaError._TRANSPORT: (Cause.OUTAGE, "the connection broke"),
    KafkaError._RESOLVE: (Cause.OUTAGE, "the broker's host name has no address"),
    KafkaError._ALL_BROKERS_DOWN: (Cause.OUTAGE, "no broker is available"),
    KafkaError._TIMED_OUT: (Cause.OUTAGE, "no answer in time"),
    KafkaError._TIMED_OUT_QUEUE: (Cause.OUTAGE, "no answer in time"),
    KafkaError._ISR_INSUFF: (Cause.OUTAGE, "fewer replicas in sync than min.insync.replicas"),
    KafkaError._QUEUE_FULL: (Cause.OUTAGE, "the client's queue is full"),
    KafkaError._CRIT_SYS_RESOURCE: (Cause.OUTAGE, "the client's host is out of memory or threads"),
    KafkaError._DESTROY: (Cause.OUTAGE, "the client was closed"),
}

_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})


def cause(error: KafkaError) -> Cause:
    """Return the cause of an error. A code that is not in the table is an outage: no attempt is counted.

    The client's `retriable` does not help: it is always false for the error of a message.
    """
    return _TABLE[error.code()][0] if error.code() in _TABLE else Cause.OUTAGE


def describe(error: KafkaError) -> str:
    """Return the code's name and its meaning, as text."""
    meaning = _TABLE[error.code()][1] if error.code() in _TABLE else error.str()
    return f"{error.name()}: {meaning}"


def refusal(error: KafkaError) -> Refusal:
    """Return the error in the form in which the core uses it."""
    return Refusal(cause(error), describe(error), error.code() in _TOO_LARGE, error.code())


def says_fenced(error: KafkaError) -> bool:
    """Return whether no topic can be created because no broker may have replicas yet.

    Brokers that start, or are late with their heartbeats, are fenced. Kafka uses the code of a replication
    factor that can never be satisfied.
    """
    return error.code() == KafkaError.INVALID_REPLICATION_FACTOR and "fenced" in error.str()
