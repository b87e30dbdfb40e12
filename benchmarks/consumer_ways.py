"""The ways in which a benchmark's consumer handles events: bare loops, textbook records, and ours.

Invariants:
- All ways do the same: one row for each event, one partition, offsets committed once a second.
- A way that records events does so in the transaction of the event's row.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import confluent_kafka
import psycopg
import redis

from outbox_pipelines import consumer
from outbox_pipelines.consumer.cache import RedisCache
from outbox_pipelines.consumer.processed_events import bucket
from outbox_pipelines.subject_keys import SubjectKeys

AT_ONCE: Final = 100
SOURCE: Final = "billing"
PLACED, FIRST, LAST = "order.placed", "mark.first", "mark.last"
_HANDLE: Final = "INSERT INTO invoices (order_id, total) VALUES (%s, %s)"
# The table that textbooks show, and their statements: an event whose row is not inserted is a duplicate.
TEXTBOOK_TABLE: Final = """
CREATE TABLE textbook_processed (
    event_id uuid NOT NULL, source text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, source))"""
_TEXTBOOK: Final = """
INSERT INTO textbook_processed (event_id, source) VALUES (%s, %s) ON CONFLICT DO NOTHING"""
_TEXTBOOK_MANY: Final = """
INSERT INTO textbook_processed (event_id, source) SELECT unnest(%s::uuid[]), %s
ON CONFLICT DO NOTHING RETURNING event_id"""
# The buckets are given: without them each query would look into all 65 partitions.
_LOOK_UP: Final = """
SELECT event_id FROM processed_events
WHERE event_id = ANY(%(ids)s) AND source = %(source)s AND bucket = ANY(%(buckets)s)"""


@dataclass
class Run:
    """One way, once.

    Args:
        ids: of the events between the marks.
    """

    dsn: str
    kafka: str
    redis_url: str
    topic: str
    ids: list[UUID]
    began: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0
    """Seconds of CPU that this process used between the marks, Kafka's client included."""

    def mark(self, event_type: str) -> None:
        if event_type == FIRST:
            self.began, self.cpu = time.perf_counter(), -time.process_time()
        else:
            self.ended = time.perf_counter()
            self.cpu += time.process_time()

    def messages(self, at_once: int = 1) -> Iterator[list[Any]]:
        """As a bare loop gets them; their offsets are committed in passing once they were handled."""
        client = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.kafka,
                "group.id": self.topic,
                "enable.auto.offset.store": False,
                "auto.commit.interval.ms": 1000,
            }
        )
        # Not by joining the group, which takes the broker 3 s.
        client.assign([confluent_kafka.TopicPartition(self.topic, 0, 0)])
        with closing(client):
            while not self.ended:
                # A short time: it is waited for in full where fewer are left than asked for.
                found: list[Any] = [each for each in client.consume(at_once, 0.01) if each.error() is None]
                events = []
                for message in found:
                    event_type = dict(message.headers())["event-type"].decode()
                    if event_type == PLACED and self.began:
                        events.append(message)
                    elif event_type == PLACED:
                        continue
                    elif event_type == FIRST:
                        self.mark(FIRST)
                    else:
                        yield events
                        events = []
                        self.mark(LAST)
                if events:
                    yield events
                for message in found:
                    client.store_offsets(message=message)


def _bare(at_once: int = 1) -> Callable[[Run], None]:
    def way(run: Run) -> None:
        with psycopg.connect(run.dsn, autocommit=True) as connection:
            for messages in run.messages(at_once):
                with connection.transaction(), connection.cursor() as cursor:
                    if len(messages) == 1:
                        cursor.execute(_HANDLE, _row(messages[0]))
                    else:
                        cursor.executemany(_HANDLE, [_row(message) for message in messages])

    return way


def _textbook(at_once: int = 1) -> Callable[[Run], None]:
    """A row for each event in the transaction of its effects."""

    def way(run: Run) -> None:
        with psycopg.connect(run.dsn, autocommit=True) as connection:
            for messages in run.messages(at_once):
                with connection.transaction(), connection.cursor() as cursor:
                    if len(messages) == 1:
                        cursor.execute(_TEXTBOOK, (_id(messages[0]), run.topic))
                        if cursor.rowcount:
                            cursor.execute(_HANDLE, _row(messages[0]))
                    else:
                        cursor.execute(_TEXTBOOK_MANY, ([_id(each) for each in messages], run.topic))
                        new = {event_id for (event_id,) in cursor.fetchall()}
                        rows = [_row(each) for each in messages if _id(each) in new]
                        cursor.executemany(_HANDLE, rows)

    return way


def _asks_redis(run: Run) -> None:
    """Look, handle, tell: what is handled twice after a crash between the last two."""
    with (
        psycopg.connect(run.dsn, autocommit=True) as connection,
        redis.Redis.from_url(run.redis_url) as client,
    ):
        for messages in run.messages():
            for message in messages:
                # A prefix of its own, for the cache is beside it.
                key = b"textbook:" + _id(message).bytes
                if not client.exists(key):
                    with connection.transaction():
                        connection.execute(_HANDLE, _row(message))
                    client.set(key, b"", ex=3600)


def once(
    batch: int | None = None,
    *,
    source: str = SOURCE,
    per_transaction: int = 1,
    cached: bool = False,
    told: bool = False,
    keys: SubjectKeys | None = None,
) -> Callable[[Run], None]:
    """The consumer; `told`: its cache knows of all events; `keys`: it decrypts."""

    def way(run: Run) -> None:
        stop = threading.Event()
        cache = RedisCache.at(run.redis_url, seconds=3600) if cached else None
        consumes = consumer.Consumer(
            source=source,
            topics=[run.topic],
            kafka={"bootstrap.servers": run.kafka, "group.id": run.topic},
            dsn=run.dsn,
            cache=cache,
            keys=keys,
        )

        def placed(event: consumer.Event, connection: psycopg.Connection[Any]) -> None:
            connection.execute(_HANDLE, [event.aggregate_id, event.payload["total"]])

        def placed_many(events: list[consumer.Event], connection: psycopg.Connection[Any]) -> None:
            rows = [(event.aggregate_id, event.payload["total"]) for event in events]
            with connection.cursor() as cursor:
                cursor.executemany(_HANDLE, rows)

        consumes.on(PLACED, batch=batch, per_transaction=per_transaction)(placed_many if batch else placed)

        @consumes.on(FIRST, LAST)
        def mark(event: consumer.Event, connection: psycopg.Connection[Any]) -> None:
            run.mark(event.type)
            if event.type == LAST:
                stop.set()

        if cache is not None and told:
            cache.remember(source, run.ids)
        consumes.run(stop)

    return way


def _looked_up(at_once: int, source: str = SOURCE) -> Callable[[Run], None]:
    """The least that finds out that all was handled before: one query."""

    def way(run: Run) -> None:
        with psycopg.connect(run.dsn, autocommit=True) as connection:
            for messages in run.messages(at_once):
                ids = [_id(message) for message in messages]
                buckets = list({bucket(each) for each in ids})
                given = {"ids": ids, "source": source, "buckets": buckets}
                found = connection.execute(_LOOK_UP, given).fetchall()
                assert len(found) == len(messages)

    return way


def _row(message: Any) -> tuple[str, int]:
    return message.key().decode(), json.loads(message.value())["total"]


def _id(message: Any) -> UUID:
    return UUID(dict(message.headers())["id"].decode())


# Each has a source of its own, except those whose events come again below.
ONE: Final[dict[str, Callable[[Run], None]]] = {
    "bare": _bare(),
    "textbook": _textbook(),
    "once": once(),
    "shared": once(source="shared", per_transaction=AT_ONCE),
    "once, cache": once(source="cached", cached=True),
    "redis": _asks_redis,
}
MANY: Final[dict[str, Callable[[Run], None]]] = {
    "bare, many": _bare(AT_ONCE),
    "textbook, many": _textbook(AT_ONCE),
    "once, many": once(AT_ONCE, source="many"),
}
AGAIN_ONE: Final[dict[str, Callable[[Run], None]]] = {
    "again": once(),
    "again, cache": once(cached=True, told=True),
    "looked up": _looked_up(1),
}
AGAIN_MANY: Final[dict[str, Callable[[Run], None]]] = {
    "again, many": once(AT_ONCE, source="many"),
    "again, many, cache": once(AT_ONCE, source="many", cached=True, told=True),
    "looked up, many": _looked_up(AT_ONCE, "many"),
}
