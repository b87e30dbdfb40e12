"""Copies of a consumer's dead letters, in a topic.

Invariants:
- A copy is acknowledged before the message becomes a dead letter: a crash can duplicate it, but not lose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_pipelines.consumer.clients import CLIENT_LOG, shared
from outbox_pipelines.consumer.errors import ConsumerError
from outbox_pipelines.consumer.reading import headers_of

_SECONDS: Final = 10.0


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
        if self._producer is None:
            ours = {
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "delivery.timeout.ms": int(_SECONDS * 1000),
            }
            self._producer = Producer({**self._settings, **ours}, logger=CLIENT_LOG)
        told: list[KafkaError | None] = []
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
            self._producer.produce(
                self._topic,
                value=message.value(),
                key=message.key(),
                headers=headers,
                on_delivery=lambda problem, _: told.append(problem),
            )
        except (KafkaException, BufferError) as refused:
            raise ConsumerError(f"{self._topic} rejects the copy of a dead letter: {refused}") from None
        self._producer.flush(_SECONDS)
        if not told:
            # The next copy is sent by a new client, which may find a broker.
            self._producer = None
            raise ConsumerError(
                f"{self._topic} did not acknowledge the copy of a dead letter: no answer in {_SECONDS:.0f} s"
            )
        if (problem := told[0]) is not None:
            raise ConsumerError(f"{self._topic} rejects the copy of a dead letter: {problem.str()}")
