"""What it costs to handle an event once: one consumer, one partition, a handler that inserts a row.

Invariants:
- Each run has a topic of its own with the same events between two marks; the time is that between the marks.
- Ways that are compared take turns, each time another one first, so that a drift falls on all alike.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final
from uuid import UUID

import confluent_kafka
import psycopg
import redis
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.redis_server import RedisServer
from benchmarks.servers import fresh_outbox
from benchmarks.slow_link import slow_link
from benchmarks.table import Row
from outbox_pipelines import consumer
from outbox_pipelines.consumer.cache import RedisCache
from outbox_pipelines.consumer.tables import bucket
from outbox_pipelines.settings import Settings

_EVENTS: Final = 5000
_ROUNDS: Final = 6
_AT_ONCE: Final = 100
# Each way, of a database in another building.
_FAR_SECONDS: Final = 0.0005
_FAR_ROUNDS: Final = 2
_SOURCE: Final = "billing"
_PLACED, _FIRST, _LAST = "order.placed", "mark.first", "mark.last"
_HANDLE: Final = "INSERT INTO invoices (order_id, total) VALUES (%s, %s)"
# The buckets are given: without them each query would look into all 65 partitions.
_LOOK_UP: Final = """
SELECT event_id FROM processed_events
WHERE event_id = ANY(%(ids)s) AND source = %(source)s AND bucket = ANY(%(buckets)s)"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with (
        fresh_outbox(servers) as settings,
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
        _redis(Path(folder)) as url,
    ):
        place = _Place(settings, url)
        place.prepare()
        place.rate(_bare())
        rates: dict[str, list[float]] = {name: [] for name in (*_NEW, *_AGAIN)}
        for n in range(_ROUNDS):
            place.forget()
            for ways in (_NEW, _AGAIN):
                first = n % len(ways)
                for name in [*ways][first:] + [*ways][:first]:
                    rates[name].append(place.rate(ways[name]))
        near = {name: median(values) for name, values in rates.items()}
        return [*_rows(near), *_far(place)]


def _far(place: _Place) -> list[Row]:
    """All come again, one at a time, and each word to the database takes its time."""
    rates: dict[str, list[float]] = {name: [] for name in _AGAIN_ONE}
    with psycopg.connect(place.settings.dsn) as connection:
        port = connection.info.port
    with slow_link(port, _FAR_SECONDS) as far:
        dsn = psycopg.conninfo.make_conninfo(place.settings.dsn, port=far)
        away = _round_trip(dsn)
        for _ in range(_FAR_ROUNDS):
            for name, way in _AGAIN_ONE.items():
                rates[name].append(place.rate(way, dsn))
    rate = {name: median(values) for name, values in rates.items()}
    return [
        Row(
            f"consumer: all delivered again, the database {away * 1000:.1f} ms away",
            f"{rate['again']:,.0f} events/s",
        ),
        Row("  with the cache", *_beside(rate, "again, cache", "again")),
        Row("  looked up, without the cache", *_beside(rate, "looked up", "again")),
    ]


def _round_trip(dsn: str) -> float:
    seconds = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(50):
            started = time.perf_counter()
            connection.execute("SELECT 1")
            seconds.append(time.perf_counter() - started)
    return median(seconds)


def _rows(rate: dict[str, float]) -> list[Row]:
    added = 1 / rate["once"] - 1 / rate["bare"]
    return [
        Row("consumer: a bare loop, no record", f"{rate['bare']:,.0f} events/s"),
        Row("  each event once", *_beside(rate, "once", "bare")),
        Row("  added cost per event", f"{added * 1e6:.0f} µs", f"of {1e6 / rate['once']:.0f}"),
        Row("  each event once, with the cache", *_beside(rate, "once, cache", "once")),
        Row("  a bare loop that reads and writes Redis", *_beside(rate, "textbook", "bare")),
        Row(f"consumer: a bare loop, {_AT_ONCE} at a time", f"{rate['bare, many']:,.0f} events/s"),
        Row("  each event once", *_beside(rate, "once, many", "bare, many")),
        Row("consumer: all delivered again", *_beside(rate, "again", "once")),
        Row("  with the cache", *_beside(rate, "again, cache", "again")),
        Row("  looked up, without the cache", *_beside(rate, "looked up", "again")),
        Row(
            f"consumer: all delivered again, {_AT_ONCE} at a time",
            *_beside(rate, "again, many", "once, many"),
        ),
        Row("  with the cache", *_beside(rate, "again, many, cache", "again, many")),
        Row("  looked up, without the cache", *_beside(rate, "looked up, many", "again, many")),
    ]


def _beside(rate: dict[str, float], name: str, other: str) -> tuple[str, str]:
    return f"{rate[name]:,.0f} events/s", f"{rate[name] / rate[other]:.2f} × {other}"


@dataclass
class _Place:
    """Where the ways run: a database, Kafka, Redis, and the ids of the events."""

    settings: Settings
    redis_url: str
    ids: list[UUID] = field(default_factory=list)

    def prepare(self) -> None:
        with psycopg.connect(self.settings.dsn, autocommit=True) as connection:
            consumer.migrate(connection)
            connection.execute("CREATE TABLE invoices (order_id text NOT NULL, total int NOT NULL)")
            made = connection.execute("SELECT uuidv7() FROM generate_series(1, %s)", [_EVENTS])
            self.ids = [event_id for (event_id,) in made]

    def forget(self) -> None:
        """Nothing was ever handled."""
        with psycopg.connect(self.settings.dsn, autocommit=True) as connection:
            connection.execute("TRUNCATE processed_events, invoices")
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushall()

    def rate(self, way: Callable[[_Run], None], dsn: str = "") -> float:
        """Events a second; `dsn` leads to the database by another way."""
        run = _Run(self, dsn or self.settings.dsn, f"bench-{uuid.uuid4().hex[:8]}")
        admin = AdminClient({"bootstrap.servers": self.settings.kafka})
        admin.create_topics([NewTopic(run.topic, 1, 1)])[run.topic].result(30)
        producer = confluent_kafka.Producer({"bootstrap.servers": self.settings.kafka})
        # The first ones are not timed: connections and plans are made there.
        marked = [(uuid.uuid4(), _PLACED) for _ in range(_AT_ONCE)]
        marked += [(uuid.uuid4(), _FIRST), *((each, _PLACED) for each in self.ids), (uuid.uuid4(), _LAST)]
        for n, (event_id, event_type) in enumerate(marked):
            headers: Any = [("id", str(event_id)), ("event-type", event_type), ("aggregate-type", "order")]
            producer.produce(run.topic, json.dumps({"total": n % 100}), str(n % 500), headers=headers)
        assert producer.flush(60) == 0
        way(run)
        admin.delete_topics([run.topic])[run.topic].result(30)
        return len(self.ids) / (run.ended - run.began)


@dataclass
class _Run:
    """One way, once."""

    place: _Place
    dsn: str
    topic: str
    began: float = 0.0
    ended: float = 0.0

    def mark(self, event_type: str) -> None:
        if event_type == _FIRST:
            self.began = time.perf_counter()
        else:
            self.ended = time.perf_counter()

    def messages(self, at_once: int = 1) -> Iterator[list[Any]]:
        """As a bare loop gets them; their offsets are committed in passing once they were handled."""
        client = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.place.settings.kafka,
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
                    if event_type == _PLACED and self.began:
                        events.append(message)
                    elif event_type == _PLACED:
                        continue
                    elif event_type == _FIRST:
                        self.mark(_FIRST)
                    else:
                        yield events
                        events = []
                        self.mark(_LAST)
                if events:
                    yield events
                for message in found:
                    client.store_offsets(message=message)


def _bare(at_once: int = 1) -> Callable[[_Run], None]:
    def way(run: _Run) -> None:
        with psycopg.connect(run.dsn, autocommit=True) as connection:
            for messages in run.messages(at_once):
                with connection.transaction(), connection.cursor() as cursor:
                    if len(messages) == 1:
                        cursor.execute(_HANDLE, _row(messages[0]))
                    else:
                        cursor.executemany(_HANDLE, [_row(message) for message in messages])

    return way


def _textbook(run: _Run) -> None:
    """Look, handle, tell: what is handled twice after a crash between the last two."""
    with (
        psycopg.connect(run.dsn, autocommit=True) as connection,
        redis.Redis.from_url(run.place.redis_url) as client,
    ):
        for messages in run.messages():
            for message in messages:
                # A prefix of its own, for the cache is beside it.
                key = b"textbook:" + _id(message).bytes
                if not client.exists(key):
                    with connection.transaction():
                        connection.execute(_HANDLE, _row(message))
                    client.set(key, b"", ex=3600)


def _once(
    batch: int | None = None, *, source: str = _SOURCE, cached: bool = False, told: bool = False
) -> Callable[[_Run], None]:
    """The consumer; `told`: its cache knows of all events."""

    def way(run: _Run) -> None:
        stop = threading.Event()
        cache = RedisCache.at(run.place.redis_url, seconds=3600) if cached else None
        consumes = consumer.Consumer(
            source=source,
            topics=[run.topic],
            kafka={"bootstrap.servers": run.place.settings.kafka, "group.id": run.topic},
            dsn=run.dsn,
            cache=cache,
        )

        def placed(event: consumer.Event, connection: psycopg.Connection[Any]) -> None:
            connection.execute(_HANDLE, [event.aggregate_id, event.payload["total"]])

        def placed_many(events: list[consumer.Event], connection: psycopg.Connection[Any]) -> None:
            rows = [(event.aggregate_id, event.payload["total"]) for event in events]
            with connection.cursor() as cursor:
                cursor.executemany(_HANDLE, rows)

        consumes.on(_PLACED, batch=batch)(placed_many if batch else placed)

        @consumes.on(_FIRST, _LAST)
        def mark(event: consumer.Event, connection: psycopg.Connection[Any]) -> None:
            run.mark(event.type)
            if event.type == _LAST:
                stop.set()

        if cache is not None and told:
            cache.remember(source, run.place.ids)
        consumes.run(stop)

    return way


def _looked_up(at_once: int) -> Callable[[_Run], None]:
    """The least that finds out that all was handled before: one query."""

    def way(run: _Run) -> None:
        with psycopg.connect(run.dsn, autocommit=True) as connection:
            for messages in run.messages(at_once):
                ids = [_id(message) for message in messages]
                buckets = list({bucket(each) for each in ids})
                given = {"ids": ids, "source": _SOURCE, "buckets": buckets}
                found = connection.execute(_LOOK_UP, given).fetchall()
                assert len(found) == len(messages)

    return way


def _row(message: Any) -> tuple[str, int]:
    return message.key().decode(), json.loads(message.value())["total"]


def _id(message: Any) -> UUID:
    return UUID(dict(message.headers())["id"].decode())


# Each in the name of another source, but for the first: what it handled comes again below.
_NEW: Final[dict[str, Callable[[_Run], None]]] = {
    "once": _once(),
    "bare": _bare(),
    "textbook": _textbook,
    "once, cache": _once(source="cached", cached=True),
    "bare, many": _bare(_AT_ONCE),
    "once, many": _once(_AT_ONCE, source="many"),
}
_AGAIN_ONE: Final[dict[str, Callable[[_Run], None]]] = {
    "again": _once(),
    "again, cache": _once(cached=True, told=True),
    "looked up": _looked_up(1),
}
_AGAIN: Final[dict[str, Callable[[_Run], None]]] = {
    **_AGAIN_ONE,
    "again, many": _once(_AT_ONCE),
    "again, many, cache": _once(_AT_ONCE, cached=True, told=True),
    "looked up, many": _looked_up(_AT_ONCE),
}


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
