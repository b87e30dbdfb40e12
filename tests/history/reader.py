"""Reads the topics of a run: what a `read_committed` consumer sees, with the time of each message.

Invariants:
- For one thread. An unavailable broker is waited for, without an error.
- The end of a partition is that of its log, not what a read_committed consumer is shown of it: a transaction
  that a killed relay has left open hides what others have committed after it, until the broker aborts it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, OffsetSpec

from tests.conftest import patience
from tests.history.business import account_of
from tests.history.record import Message, Replayed
from tests.kafka_clients import AdminClient, Consumer

PARTITIONS = 4


class Reader:
    """Follows topics from their beginning; give each kind's topic.

    Args:
        keeps: whether messages are kept, or only their tokens; those of replays always are.
    """

    def __init__(self, kafka: str, topics: Mapping[str, str], *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.messages: list[Message] = []
        self.tokens: set[str] = set()
        self.replayed: list[Replayed] = []
        self._kinds = {topic: kind for kind, topic in topics.items()}
        self._kafka = kafka
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka,
                "group.id": uuid.uuid4().hex,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # A reader that is sent to the end would miss messages without a word.
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "reconnect.backoff.max.ms": 500,
            }
        )
        found = self._consumer.list_topics(timeout=60).topics
        partitions = [
            TopicPartition(topic, partition, 0)
            for topic in topics.values()
            if topic in found
            for partition in found[topic].partitions
        ]
        self._partitions = [(place.topic, place.partition) for place in partitions]
        self._ends: dict[tuple[str, int], int] = {}
        """By partition, where its end was reached last."""
        self._consumer.assign(partitions)

    def poll(self, seconds: float) -> None:
        """Takes what there is; waits up to so long for something."""
        for message in self._consumer.consume(2000, seconds):
            error = message.error()
            if error is None:
                self._take(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                assert topic is not None
                assert partition is not None
                assert offset is not None
                self._ends[topic, partition] = offset

    def _take(self, message: Any) -> None:
        body = json.loads(message.value())
        headers = dict(message.headers())
        if "replay-id" in headers:
            self.replayed.append(
                Replayed(
                    headers["replay-id"].decode(),
                    self._kinds[message.topic()],
                    message.partition(),
                    message.offset(),
                    account_of(message.key().decode()),
                    body["n"],
                    body["token"],
                    headers["id"].decode(),
                )
            )
            return
        self.tokens.add(body["token"])
        if not self._keeps:
            return
        self.messages.append(
            Message(
                self._kinds[message.topic()],
                message.partition(),
                message.offset(),
                account_of(message.key().decode()),
                body["n"],
                body["token"],
                headers["id"].decode(),
                message.timestamp()[1] / 1000,
            )
        )

    def close(self) -> None:
        self._consumer.close()

    def read_to_end(self) -> None:
        """Returns when every partition was read as far as its log goes now."""
        goals = self._logs()
        seen, deadline = -1, 0.0
        while unread := [place for place, goal in goals.items() if self._ends.get(place, -1) < goal]:
            if len(self.messages) > seen:
                seen, deadline = len(self.messages), time.monotonic() + patience(60)
            assert time.monotonic() < deadline, f"nothing more of {sorted(unread)} in time"
            self.poll(0.1)

    def _logs(self) -> dict[tuple[str, int], int]:
        """The offset of the end of each partition's log, also behind an open transaction."""
        if not self._partitions:
            return {}
        client = AdminClient({"bootstrap.servers": self._kafka})
        latest = {TopicPartition(*place): OffsetSpec.latest() for place in self._partitions}  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + patience(60)
        while True:
            asked = client.list_offsets(latest, request_timeout=30)
            try:
                found = {place: answer.result(60).offset for place, answer in asked.items()}
            except KafkaException:
                assert time.monotonic() < deadline, "no answer about the ends of the topics in time"
                continue
            return {(place.topic, place.partition): offset for place, offset in found.items()}


def read(kafka: str, topics: Mapping[str, str]) -> tuple[list[Message], list[Replayed]]:
    """Everything in the topics now, and what replays have sent; nothing from one that does not exist."""
    reader = Reader(kafka, topics)
    try:
        reader.read_to_end()
    finally:
        reader.close()
    return reader.messages, reader.replayed


def limit(kafka: str, topics: Mapping[str, str], size: int | None) -> None:
    """Lets them take batches up to so many bytes, or as many as the broker's own limit says."""
    how = AlterConfigOpType.DELETE if size is None else AlterConfigOpType.SET
    entry = ConfigEntry("max.message.bytes", None if size is None else str(size), incremental_operation=how)
    client = AdminClient({"bootstrap.servers": kafka})
    resources = [
        ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        for topic in topics.values()
    ]
    for changed in client.incremental_alter_configs(resources).values():
        changed.result(600)


def remove(kafka: str, topics: Mapping[str, str]) -> None:
    """Deletes them, as far as they are there."""
    client = AdminClient({"bootstrap.servers": kafka})
    for deleted in client.delete_topics(
        [name for topic in topics.values() for name in (topic, f"{topic}.dlq")]
    ).values():
        with suppress(KafkaException):
            deleted.result(30)


def create(kafka: str, topics: Mapping[str, str]) -> None:
    """Makes them, and those for dead letters, with the broker's clock for the messages' times: a client's is
    of when it buffered them."""
    clock = {"message.timestamp.type": "LogAppendTime"}
    client = AdminClient({"bootstrap.servers": kafka})
    names = [name for topic in topics.values() for name in (topic, f"{topic}.dlq")]
    for made in client.create_topics(
        [NewTopic(name, PARTITIONS, -1, config=clock) for name in names]
    ).values():
        made.result(30)

    def are_known() -> bool:
        found = client.list_topics(timeout=30).topics
        return all(name in found and len(found[name].partitions) == PARTITIONS for name in names)

    # The broker says so before it knows them itself, and a reader assigns itself what the broker knows.
    deadline = time.monotonic() + patience(60)
    while not are_known():
        assert time.monotonic() < deadline, f"{names} are not known in time"
        time.sleep(0.02)
