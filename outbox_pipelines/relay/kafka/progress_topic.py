"""What Kafka knows of how far a shard is: the last record of its partition in the progress topic.

Invariants:
- Who reads a record decides what it contains, and when it is valid: `core.record` for a shard.
- A record that no relay wrote is skipped: the last one of a relay before it is still the truth, and
  without any the database's row counts, which repeats events at worst.
- A transaction begins with a message without a value, and ends with its record.
- One partition per shard, so that an open transaction of one shard does not delay the reader of another.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from outbox_pipelines.core.topic_ends import read_to_ends
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.relay.kafka import client, client_errors
from outbox_pipelines.settings import MessageSettings, OutboxSettings

_LOG = logging.getLogger(__name__)
R = TypeVar("R")
_SECONDS: Final = 30.0
# The Kafka client reports a timeout first.
_GRACE_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.1
# Offsets to look back for a record at first: control records and aborted ones take some.
_LOOK_BACK: Final = 1000
_NOT_ALLOWED: Final = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)


def create_topic(settings: MessageSettings, name: str, shards: int) -> None:
    """Makes the progress topic with a partition for each shard, or more partitions where there are too few.

    Raises:
        SetupError: it may not be made, or Kafka would delete records of it.
        UnavailableError: no broker answers.
    """
    admin = AdminClient(client.config(settings), logger=client.LOG)
    topic = NewTopic(name, shards, settings.topic_replication, config={"cleanup.policy": "compact"})
    try:
        made = admin.create_topics([topic], request_timeout=_SECONDS)
        if _was_made(made[name], KafkaError.TOPIC_ALREADY_EXISTS):
            return
        deadline = time.monotonic() + _SECONDS
        while not _fits(admin, name, shards):
            if time.monotonic() > deadline:
                raise UnavailableError(f"the progress topic {name} was made, but no broker knows it yet")
            time.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        raise UnavailableError(
            f"the progress topic {name} cannot be created: the Kafka client gives no answer"
        ) from None
    except KafkaException as error:
        reason = error.args[0]
        if _may_pass(reason):
            raise UnavailableError(f"the progress topic {name} cannot be created: {reason.str()}") from None
        raise SetupError(
            f"exactly_once needs the topic {name}, which cannot be created ({reason.str()}): create it with "
            "a partition for each shard and cleanup.policy=compact, or allow the relay to create it"
        ) from None


def _fits(admin: Any, name: str, shards: int) -> bool:
    """Correct a topic that is there; False while the broker that is asked has not yet heard of it.

    Raises:
        SetupError: Kafka would delete records of it.
        KafkaException: anything else.
    """
    try:
        found = admin.list_topics(name, timeout=_SECONDS).topics[name]
        if found.error is not None:
            raise KafkaException(found.error)
        if len(found.partitions) < shards:
            more = admin.create_partitions([NewPartitions(name, shards)], request_timeout=_SECONDS)
            # The relays of all shards ask for them at once: one is first, and that is enough.
            _was_made(more[name], KafkaError.INVALID_PARTITIONS)
        _require_kept(admin, name)
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return False
        raise
    return True


def _require_kept(admin: Any, name: str) -> None:
    """Raise `SetupError` if Kafka may delete the last record of a shard; without the right to look, warn."""
    resource = ConfigResource(ResourceType.TOPIC, name)
    try:
        found = admin.describe_configs([resource], request_timeout=_SECONDS)[resource].result(
            _SECONDS + _GRACE_SECONDS
        )
    except KafkaException as error:
        if error.args[0].code() not in _NOT_ALLOWED:
            raise
        _LOG.warning(
            "the progress topic %s must have cleanup.policy=compact, which cannot be checked: grant "
            "DESCRIBE_CONFIGS on it",
            name,
        )
        return
    given = {key: found[key].value for key in ("cleanup.policy", "retention.ms", "retention.bytes")}
    policy = given["cleanup.policy"].replace(" ", "").split(",")
    is_finite = "delete" in policy and (given["retention.ms"], given["retention.bytes"]) != ("-1", "-1")
    if "compact" not in policy or is_finite:
        said = ", ".join(f"{key}={value}" for key, value in given.items())
        raise SetupError(
            f"the progress topic {name} does not keep the last record of each shard ({said}), so that events "
            "would be published again after a crash: set its cleanup.policy to compact"
        )


def _may_pass(reason: KafkaError) -> bool:
    is_unavailable = reason.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
    return is_unavailable or reason.retriable() or client_errors.says_fenced(reason)


def _was_made(answer: Future[None], was_there: int) -> bool:
    """False where Kafka says that it was there before, which is the code `was_there`."""
    try:
        answer.result(_SECONDS + _GRACE_SECONDS)
    except KafkaException as error:
        if error.args[0].code() == was_there:
            return False
        raise
    return True


def read_last(
    settings: OutboxSettings, topic: str, shard: int, decode: Callable[[bytes | None], R | None]
) -> R | None:
    """The last committed record of a shard; None where there is none.

    Args:
        decode: gives a record from the value of a message, None where no relay wrote it.

    Raises:
        UnavailableError: Kafka does not answer.
    """
    consumer = Consumer(
        {
            **client.consumer_config(settings),
            "group.id": f"outbox-progress-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        },
        logger=client.LOG,
    )
    try:
        low, high = _ends(consumer, TopicPartition(topic, shard))
        back = _LOOK_BACK
        while True:
            start = max(low, high - back)
            found = _last_from(consumer, TopicPartition(topic, shard, start), decode)
            if found is not None or start == low:
                return found
            back *= 10
    except KafkaException as error:
        raise UnavailableError(f"the progress topic {topic} cannot be read: {error.args[0].str()}") from None
    finally:
        consumer.close()


def _ends(consumer: Any, partition: TopicPartition) -> tuple[int, int]:
    """Its first offset, and the one behind its last; a topic just made has no leaders for a moment."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            low, high = consumer.get_watermark_offsets(partition, timeout=_SECONDS)
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            consumer.poll(0.1)
        else:
            return low, high


def _last_from(consumer: Any, start: TopicPartition, decode: Callable[[bytes | None], R | None]) -> R | None:
    """Return the last record of a relay from an offset on. The broker reports the end of the partition; it
    cannot be computed, because control records and aborted messages also use offsets."""
    found: R | None = None
    foreign: list[int] = []
    deadline = time.monotonic() + _SECONDS
    for messages in read_to_ends(consumer, [start], at_once=1):
        for message in messages:
            if (message.key(), message.value()) == (str(start.partition).encode(), None):
                # What a transaction begins with.
                continue
            record = decode(message.value())
            found = record or found
            if record is None:
                foreign.append(message.offset())
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"the progress topic {start.topic} gives no answer within {_SECONDS:.0f} s"
            )
    if foreign:
        _LOG.warning(
            "ignored %d records of the progress topic %s, partition %d, that no relay wrote "
            "(last offset %d): allow only the relay to write to this topic",
            len(foreign),
            start.topic,
            start.partition,
            foreign[-1],
        )
    return found
