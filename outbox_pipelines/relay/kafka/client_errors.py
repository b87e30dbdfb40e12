"""The errors that Kafka's client reports for a message that was not published, and what caused each.

Invariants:
- One table lists every code that a producer can report, with its meaning. Every other code is an outage.
- Only a failure of the kind EVENT counts as an attempt, and only if the event was sent alone.
"""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError

from outbox_pipelines.relay.core.outcomes import Kind, Refusal

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
_TABLE: Final[dict[int, tuple[Kind, str]]] = {
    KafkaError.MSG_SIZE_TOO_LARGE: (Kind.EVENT, "larger than the topic's max.message.bytes"),
    KafkaError.RECORD_LIST_TOO_LARGE: (Kind.EVENT, "its batch is larger than a segment of the topic"),
    KafkaError.INVALID_RECORD: (Kind.EVENT, "the broker's record validation rejects it"),
    KafkaError._INVALID_ARG: (Kind.EVENT, "the client cannot make a message from it"),
    KafkaError.UNKNOWN_TOPIC_OR_PART: (Kind.TOPIC, "the topic does not exist"),
    KafkaError._UNKNOWN_TOPIC: (Kind.TOPIC, "the topic does not exist"),
    KafkaError._UNKNOWN_PARTITION: (Kind.TOPIC, "the topic has fewer partitions than before"),
    UNKNOWN_TOPIC_ID: (Kind.TOPIC, "the topic was deleted and created again"),
    INCONSISTENT_TOPIC_ID: (Kind.TOPIC, "the topic was deleted and created again"),
    KafkaError.TOPIC_EXCEPTION: (Kind.TOPIC, "the broker rejects the topic's name"),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: (
        Kind.TOPIC,
        "not authorized to write to the topic: grant WRITE on it",
    ),
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: (
        Kind.TOPIC,
        "the topic's message format is too old for headers",
    ),
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: (Kind.TOPIC, "the topic does not support the compression type"),
    # The message's time is that of the relay's clock, so no event is the cause.
    KafkaError.INVALID_TIMESTAMP: (
        Kind.TOPIC,
        "the topic rejects the time of the relay's clock: check the clocks, and the topic's "
        "message.timestamp.before.max.ms and message.timestamp.after.max.ms",
    ),
    KafkaError.POLICY_VIOLATION: (Kind.TOPIC, "a policy of the broker rejects it"),
    KafkaError._PURGE_QUEUE: (Kind.CONSEQUENCE, "not sent yet when the producer was discarded"),
    KafkaError._PURGE_INFLIGHT: (Kind.CONSEQUENCE, "in flight when the producer was discarded"),
    KafkaError._GAPLESS_GUARANTEE: (Kind.CONSEQUENCE, "behind a refused message of its partition"),
    _INVALID_DIFFERENT_RECORD: (Kind.CONSEQUENCE, "another record of its batch is invalid"),
    KafkaError._FATAL: (Kind.CONSEQUENCE, "the producer had failed before"),
    KafkaError._STATE: (Kind.CONSEQUENCE, "the transaction had failed before"),
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: (Kind.CONSEQUENCE, "behind a message that the broker lost"),
    KafkaError.DUPLICATE_SEQUENCE_NUMBER: (
        Kind.CONSEQUENCE,
        "the broker has seen its sequence number before",
    ),
    KafkaError.UNKNOWN_PRODUCER_ID: (Kind.CONSEQUENCE, "the broker has forgotten the producer"),
    KafkaError.INVALID_PRODUCER_ID_MAPPING: (
        Kind.CONSEQUENCE,
        "the broker has forgotten the transactional.id",
    ),
    KafkaError.INVALID_TXN_STATE: (Kind.CONSEQUENCE, "the transaction had ended before"),
    _TRANSACTION_ABORTABLE: (Kind.CONSEQUENCE, "the transaction must be aborted"),
    KafkaError._FENCED: (Kind.OWNER, "a newer relay uses the same transactional.id"),
    KafkaError.PRODUCER_FENCED: (Kind.OWNER, "a newer relay uses the same transactional.id"),
    KafkaError.INVALID_PRODUCER_EPOCH: (Kind.OWNER, "a newer relay uses the same transactional.id"),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: (
        Kind.OUTAGE,
        "not authorized to write idempotently: no events are published",
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        Kind.OUTAGE,
        "not authorized to use transactions: no events are published",
    ),
    KafkaError.SASL_AUTHENTICATION_FAILED: (Kind.OUTAGE, "the broker rejects the credentials"),
    KafkaError._AUTHENTICATION: (Kind.OUTAGE, "the broker rejects the credentials"),
    KafkaError._SSL: (Kind.OUTAGE, "the TLS connection to the broker failed"),
    # Java's client also retries these.
    KafkaError.UNKNOWN: (Kind.OUTAGE, "the broker failed without a reason"),
    KafkaError.INVALID_MSG: (Kind.OUTAGE, "the message was damaged in transit to the broker"),
    KafkaError.LEADER_NOT_AVAILABLE: (Kind.OUTAGE, "the partition has no leader"),
    KafkaError.NOT_LEADER_FOR_PARTITION: (Kind.OUTAGE, "the partition has another leader"),
    KafkaError.FENCED_LEADER_EPOCH: (Kind.OUTAGE, "the partition has another leader"),
    KafkaError.UNKNOWN_LEADER_EPOCH: (Kind.OUTAGE, "the partition has another leader"),
    KafkaError.REQUEST_TIMED_OUT: (Kind.OUTAGE, "replicas did not answer the broker in time"),
    KafkaError.BROKER_NOT_AVAILABLE: (Kind.OUTAGE, "the broker is unavailable"),
    KafkaError.REPLICA_NOT_AVAILABLE: (Kind.OUTAGE, "a replica is unavailable"),
    KafkaError.NOT_ENOUGH_REPLICAS: (Kind.OUTAGE, "fewer replicas in sync than min.insync.replicas"),
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND: (
        Kind.OUTAGE,
        "fewer replicas in sync than min.insync.replicas",
    ),
    KafkaError.NETWORK_EXCEPTION: (Kind.OUTAGE, "the broker lost a connection"),
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: (Kind.OUTAGE, "the transaction coordinator is starting"),
    KafkaError.COORDINATOR_NOT_AVAILABLE: (Kind.OUTAGE, "no transaction coordinator"),
    KafkaError.NOT_COORDINATOR: (Kind.OUTAGE, "another broker is the transaction coordinator"),
    KafkaError.CONCURRENT_TRANSACTIONS: (Kind.OUTAGE, "the previous transaction has not ended yet"),
    KafkaError.TRANSACTION_COORDINATOR_FENCED: (Kind.OUTAGE, "another broker is the transaction coordinator"),
    KafkaError.THROTTLING_QUOTA_EXCEEDED: (Kind.OUTAGE, "a quota of the broker is exhausted"),
    KafkaError.KAFKA_STORAGE_ERROR: (Kind.OUTAGE, "the broker's disk is full or broken"),
    KafkaError.LOG_DIR_NOT_FOUND: (Kind.OUTAGE, "the broker's directory is missing"),
    KafkaError.INVALID_REQUIRED_ACKS: (Kind.OUTAGE, "the broker does not support acks=all"),
    KafkaError.UNSUPPORTED_VERSION: (Kind.OUTAGE, "the broker is too old"),
    KafkaError._BAD_MSG: (Kind.OUTAGE, "the broker's answer is damaged"),
    KafkaError._MSG_TIMED_OUT: (Kind.OUTAGE, "no broker accepted it in time"),
    KafkaError._TRANSPORT: (Kind.OUTAGE, "the connection broke"),
    KafkaError._RESOLVE: (Kind.OUTAGE, "the broker's host name has no address"),
    KafkaError._ALL_BROKERS_DOWN: (Kind.OUTAGE, "no broker is available"),
    KafkaError._TIMED_OUT: (Kind.OUTAGE, "no answer in time"),
    KafkaError._TIMED_OUT_QUEUE: (Kind.OUTAGE, "no answer in time"),
    KafkaError._ISR_INSUFF: (Kind.OUTAGE, "fewer replicas in sync than min.insync.replicas"),
    KafkaError._QUEUE_FULL: (Kind.OUTAGE, "the client's queue is full"),
    KafkaError._CRIT_SYS_RESOURCE: (Kind.OUTAGE, "the client's host is out of memory or threads"),
    KafkaError._DESTROY: (Kind.OUTAGE, "the client was closed"),
}

_TOO_LARGE: Final = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})


def kind(error: KafkaError) -> Kind:
    """Return the cause of an error. A code that is not in the table is an outage: no attempt is counted.

    The client's `retriable` does not help: it is always false for the error of a message.
    """
    return _TABLE[error.code()][0] if error.code() in _TABLE else Kind.OUTAGE


def describe(error: KafkaError) -> str:
    """Return the code's name and its meaning, as text."""
    meaning = _TABLE[error.code()][1] if error.code() in _TABLE else error.str()
    return f"{error.name()}: {meaning}"


def refusal(error: KafkaError) -> Refusal:
    """Return the error in the form in which the core uses it."""
    return Refusal(kind(error), describe(error), error.code() in _TOO_LARGE, error.code())


def says_fenced(error: KafkaError) -> bool:
    """Return whether no topic can be created because no broker may have replicas yet.

    Brokers that start, or are late with their heartbeats, are fenced. Kafka uses the code of a replication
    factor that can never be satisfied.
    """
    return error.code() == KafkaError.INVALID_REPLICATION_FACTOR and "fenced" in error.str()
