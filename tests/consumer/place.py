"""What a consumer of these tests stands on: a topic, a database with its tables, and what handlers did."""

from __future__ import annotations

import functools
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, overload

import confluent_kafka
import psycopg
from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec

from outbox_pipelines.consumer import AsyncConsumer, Consumer, Counts, Event
from tests import kafka_clients
from tests.conftest import session, wait_until
from tests.kafka_clients import administrator, committed, lent
from tests.relay.topic import create

DAY_MS = 86_400_000
_FIRST: Final[Any] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LAST: Final[Any] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_NO_LEADER = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)
_NO_COORDINATOR = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
# The next member under this name takes over at once, not when the group misses the one that was killed.
STATIC = {"group.instance.id": "one", "session.timeout.ms": 6000}


def uuid7(at_ms: int | None = None) -> uuid.UUID:
    """An id of version 7 of this time."""
    at_ms = time.time_ns() // 1_000_000 if at_ms is None else at_ms
    random = uuid.uuid4().int & ((1 << 80) - 1)
    number = at_ms << 80 | random
    number = number & ~(0xF << 76) | 7 << 76
    return uuid.UUID(int=number & ~(3 << 62) | 2 << 62)


@dataclass(frozen=True)
class Place:
    """One test's own topic and database."""

    dsn: str
    kafka: str
    topic: str

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = session(self.dsn).execute(query.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, *values: object) -> Any:
        [(value,)] = self.rows(query, *values)
        return value

    def send(self, *ids: object, type: str = "order.placed", keys: int = 10, **headers: str) -> list[str]:
        """An event for each id, in the default shape, the n-th about aggregate n modulo `keys`."""
        for n, event_id in enumerate(ids):
            ours = {"id": str(event_id), "event-type": type, "aggregate-type": "order"}
            self.put(f'{{"n": {n}}}', key=str(n % keys), **{**ours, **headers})
        return [str(each) for each in ids]

    def put(self, value: str | bytes | None, *, key: str | bytes = "1", **headers: str) -> None:
        """A message as it is; an underscore in a header's name is a dash."""
        producer = _producer(self.kafka, os.getpid())
        named: list[tuple[str, str | bytes | None]] = [
            (name.replace("_", "-"), text) for name, text in headers.items()
        ]
        producer.produce(self.topic, value, key=key, headers=named)
        assert producer.flush(60) == 0

    def load(self, events: int, *, first: int = 0, keys: int = 20) -> None:
        """Many events at once, payload {"n": 0 …}, or counted from `first`."""
        # Without idempotence a request that is repeated comes behind those that followed it.
        order = {"enable.idempotence": True, "partitioner": "murmur2_random"}
        producer = kafka_clients.Producer({"bootstrap.servers": self.kafka, **order})
        for n in range(first, first + events):
            headers: list[tuple[str, str | bytes | None]] = [
                ("id", str(uuid7())),
                ("event-type", "order.placed"),
                ("aggregate-type", "order"),
            ]
            producer.produce(self.topic, f'{{"n": {n}}}', key=str(n % keys), headers=headers)
        assert producer.flush(60) == 0

    def consumer(self, source: str = "billing", group: str | None = None, **more: Any) -> Consumer:
        """One whose handler of order.placed writes a row of `effects`, twice if called twice."""
        consumer: Consumer = self.bare(source, group, **more)
        consumer.on("order.placed")(effect)
        return consumer

    @overload
    def bare(
        self, source: str = ..., group: str | None = ..., *, kind: type[AsyncConsumer], **more: Any
    ) -> AsyncConsumer: ...

    @overload
    def bare(
        self, source: str = ..., group: str | None = ..., *, kind: type[Consumer] = ..., **more: Any
    ) -> Consumer: ...

    def bare(
        self,
        source: str = "billing",
        group: str | None = None,
        *,
        kind: type[Consumer | AsyncConsumer] = Consumer,
        **more: Any,
    ) -> Consumer | AsyncConsumer:
        """One without handlers; each test has groups of its own, since topics are."""
        kafka = {
            "bootstrap.servers": self.kafka,
            "group.id": f"{self.topic}-{group or source}",
            "heartbeat.interval.ms": 100,
            **more.pop("kafka", {}),
        }
        database = {} if more.keys() & {"connect", "session"} else {"dsn": self.dsn}
        more = {"retry_seconds": 0.2, "topics": [self.topic], **database, **more}
        return kind(source=source, kafka=kafka, **more)

    def effects(self) -> int:
        return int(self.value("SELECT count(*) FROM effects"))

    def processed(self, source: str = "billing") -> int:
        return int(self.value("SELECT count(*) FROM processed_events WHERE source = %s", source))

    def inbox(self, source: str = "billing") -> dict[str, int]:
        """How many messages are in which state."""
        query = "SELECT state, count(*)::int FROM inbox WHERE source = %s GROUP BY state"
        return dict(self.rows(query, source))

    def beside(self, name: str) -> Place:
        """Another topic, and the same database."""
        topic = f"{self.topic}-{name}"
        create(self.kafka, topic, 4)
        return replace(self, topic=topic)

    def uncommitted(self, group: str = "billing") -> int:
        """How many messages of the topic the group would get again, or for the first time."""
        return self.left_to(f"{self.topic}-{group}")

    def left_to(self, group: str) -> int:
        """The same for a group whose name does not begin with the topic's."""
        left: list[int] = []

        def is_told() -> bool:
            try:
                with lent(administrator, self.kafka) as admin:
                    left.append(_left(self.kafka, admin, self.topic, group))
            except KafkaException as error:
                if error.args[0].code() not in (*_NO_COORDINATOR, *_NO_LEADER):
                    raise
            return bool(left)

        wait_until(is_told, what="the offsets of a group, and the ends of a topic")
        return left[0]


# A client costs more than what it is used for here.
@functools.cache
def _producer(kafka: str, process: int) -> confluent_kafka.Producer:
    return kafka_clients.Producer({"bootstrap.servers": kafka, "linger.ms": 0})


def _left(kafka: str, admin: kafka_clients.AdminClient, topic: str, group: str) -> int:
    """How many messages are behind a group's offsets, or in the topic where it has none."""
    partitions = admin.list_topics(topic, timeout=60).topics[topic].partitions
    at_group = committed(kafka, group, [TopicPartition(topic, n) for n in partitions])
    ends = _offsets(admin, at_group, _LAST)
    begins = _offsets(admin, [each for each in at_group if each.offset < 0], _FIRST)
    return sum(ends[at.partition] - begins.get(at.partition, at.offset) for at in at_group)


def _offsets(
    admin: kafka_clients.AdminClient, partitions: list[TopicPartition], which: OffsetSpec
) -> dict[int, int]:
    if not partitions:
        return {}
    asked = {TopicPartition(each.topic, each.partition): which for each in partitions}
    answers = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
    return {at.partition: answer.result(60).offset for at, answer in answers.items()}


def commit(client: confluent_kafka.Consumer, offsets: list[TopicPartition]) -> None:
    """A group's offsets, by a client that is no member: it may know no coordinator of a new one yet."""

    def is_done() -> bool:
        try:
            client.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() not in _NO_COORDINATOR:
                raise
            return False
        return True

    wait_until(is_done, what="a commit of offsets")


def effect(event: Event, connection: psycopg.Connection[Any]) -> None:
    """What a handler does: its own row, in the consumer's transaction."""
    connection.execute(
        "INSERT INTO effects (event_id, key, n) VALUES (%s, %s, %s)",
        [event.id, event.aggregate_id, (event.payload or {}).get("n")],
    )


@dataclass
class Run:
    """A consumer at work in a thread."""

    consumer: Consumer
    stop: threading.Event = field(default_factory=threading.Event)
    counts: Counts | None = None
    failure: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.counts = self.consumer.run(self.stop)
        except BaseException as error:  # noqa: BLE001 - for the test
            self.failure = error

    def end(self) -> Counts:
        """Stops it; what it counted, or its failure."""
        self.stop.set()
        return self.wait()

    def wait(self) -> Counts:
        self.thread.join(600)
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure
        assert self.counts is not None
        return self.counts


@contextmanager
def running(consumer: Consumer) -> Iterator[Run]:
    run = Run(consumer)
    try:
        yield run
    except AssertionError as error:
        # What was waited for did not come, because the consumer is gone.
        raise error from run.failure
    finally:
        run.stop.set()
        run.thread.join(600)


class Part(Run):
    """One half of a consumer at work in a thread: `receive` or `drain`."""

    def __init__(self, consumer: Consumer, part: str) -> None:
        self.part = part
        super().__init__(consumer)

    def _run(self) -> None:
        try:
            self.counts = getattr(self.consumer, self.part)(self.stop)
        except BaseException as error:  # noqa: BLE001 - for the test
            self.failure = error


@contextmanager
def at_work(consumer: Consumer, part: str) -> Iterator[Part]:
    run = Part(consumer, part)
    try:
        yield run
    except AssertionError as error:
        raise error from run.failure
    finally:
        run.stop.set()
        run.thread.join(600)
