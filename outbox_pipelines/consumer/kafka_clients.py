"""The Kafka clients of a consumer: their settings, their log, and the topic for copies of dead letters.

Invariants:
- Settings that the guarantees need cannot be changed.
- A copy is acknowledged before the message becomes a dead letter: a crash can duplicate it, but not lose it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_pipelines.consumer.errors import ConsumerError
from outbox_pipelines.consumer.kafka_messages import headers_of
from outbox_pipelines.core.secret import SECRET_NAME, register
from outbox_pipelines.errors import SetupError

_OURS: Final = logging.getLogger("outbox_pipelines")
CLIENT_LOG: Final = logging.getLogger("outbox_pipelines.librdkafka")
"""The log of Kafka's client, which repeats errors often: shown only if this package's level is debug."""
# The settings of a consumer that other clients accept.
_SHARED: Final = ("bootstrap.servers", "security.protocol", "oauth_cb", "client.id", "client.rack")
_SHARED_PREFIXES: Final = ("sasl.", "enable.sasl.", "ssl.", "socket.", "broker.", "enable.ssl", "https.")
_COPY_SECONDS: Final = 10.0
_COPYING: Final = {
    "enable.idempotence": True,
    "partitioner": "murmur2_random",
    "delivery.timeout.ms": int(_COPY_SECONDS * 1000),
}
_FIXED: Final[dict[str, Any]] = {
    # Offsets follow the database.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Partitions that stay are not interrupted.
    "partition.assignment.strategy": "cooperative-sticky",
    "group.protocol": "classic",
    # With `latest`, a partition added to the topic would start after its first events.
    "auto.offset.reset": "earliest",
    "enable.partition.eof": False,
}
_DEFAULTS: Final[dict[str, Any]] = {
    "isolation.level": "read_committed",
    # Longer than the client needs to reach a group's new coordinator, for which it asks behind a fetch that
    # waits. A commit that it repeats earlier fails by its own change of connection, and has it look again:
    # seconds, without heartbeats.
    "retry.backoff.ms": 1000,
}
_REFUSED: Final = {
    "default.topic.config": "it would set others; give each under its own name",
    "topic.blacklist": "the events of these topics would never be handled",
    "test.mock.num.brokers": "the events of brokers that exist only in the client would be handled",
}
_SAME: Final = {"smallest": "earliest", "beginning": "earliest"}


def _is_wanted(_record: logging.LogRecord) -> bool:
    return _OURS.isEnabledFor(logging.DEBUG)


# Here, for an application that configures logging itself.
CLIENT_LOG.addFilter(_is_wanted)


def shared(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a consumer that other clients of the same cluster accept."""
    return {
        name: value for name, value in kafka.items() if name in _SHARED or name.startswith(_SHARED_PREFIXES)
    }


def settings(given: Mapping[str, Any], group: str) -> dict[str, Any]:
    """What the client is made with: the user's settings, but for those that the guarantees need.

    Raises:
        SetupError: a setting contradicts a guarantee, no broker is given, or they are no settings at all.
    """
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise SetupError('kafka is no dictionary by name: give {"bootstrap.servers": "broker:9092"}')
    for name, why in _REFUSED.items():
        if name in given:
            raise SetupError(f"kafka has {name}: remove it: {why}")
    for name, ours in _FIXED.items():
        # librdkafka takes settings of topics under two names.
        for given_name in {name, f"topic.{name}"} & given.keys():
            theirs = str(given[given_name]).lower()
            if _SAME.get(theirs, theirs) != str(ours).lower():
                raise SetupError(
                    f"kafka has {given_name}={theirs}: remove it, the consumer requires {str(ours).lower()}"
                )
    register(*(str(value) for name, value in given.items() if SECRET_NAME.search(name)))
    brokers = given.get("bootstrap.servers")
    if not isinstance(brokers, str) or not brokers:
        raise SetupError('kafka has no broker: give {"bootstrap.servers": "broker:9092"}')
    if given.get("group.id", group) == "":
        raise SetupError("kafka has an empty group.id: give the group's name, or leave it out")
    return {**_DEFAULTS, "group.id": group, **given, **_FIXED}


class DeadLetterTopic:
    """The topic for copies; the producer is created for the first one."""

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._settings = shared(kafka)
        self._topic = topic
        self._producer: Producer | None = None

    def send(self, message: Any, *, source: str, attempts: int, error: str) -> None:
        """Send a copy and wait for the acknowledgment, at most 10 s.

        Raises:
            ConsumerError: there was no answer, or the broker rejected the copy.
        """
        results: list[KafkaError | None] = []
        reasons = {
            "dead-letter-reason": error,
            "dead-letter-attempts": str(attempts),
            "dead-letter-source": source,
            "dead-letter-topic": message.topic(),
            "dead-letter-partition": str(message.partition()),
            "dead-letter-offset": str(message.offset()),
        }
        headers = [*headers_of(message), *((name, text.encode()) for name, text in reasons.items())]
        try:
            if self._producer is None:
                self._producer = Producer({**self._settings, **_COPYING}, logger=CLIENT_LOG)
            self._producer.produce(
                self._topic,
                value=message.value(),
                key=message.key(),
                headers=headers,
                on_delivery=lambda problem, _: results.append(problem),
            )
        except (KafkaException, BufferError) as refused:
            raise ConsumerError(f"{self._topic} rejects the copy of a dead letter: {refused}") from None
        self._producer.flush(_COPY_SECONDS)
        if not results:
            # The next copy is sent by a new client, which may find a broker.
            self._producer = None
            raise ConsumerError(
                f"{self._topic} did not acknowledge the copy of a dead letter: "
                f"no answer in {_COPY_SECONDS:.0f} s"
            )
        if (problem := results[0]) is not None:
            raise ConsumerError(f"{self._topic} rejects the copy of a dead letter: {problem.str()}")
