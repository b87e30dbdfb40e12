"""What it costs to handle an event once: one consumer, one partition, a handler that inserts a row.

Invariants:
- Each run has a topic of its own with the same events between two marks; the time is that between the marks.
- Ways that are compared take turns in many short rounds, each time another one first, so that a drift falls
  on all alike. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple
from uuid import UUID

import confluent_kafka
import psycopg
import redis
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.consumer_ways import (
    AGAIN_MANY,
    AGAIN_ONE,
    AT_ONCE,
    FIRST,
    LAST,
    MANY,
    ONE,
    PLACED,
    TEXTBOOK_TABLE,
    Run,
)
from benchmarks.quick import sized
from benchmarks.redis_server import RedisServer
from benchmarks.servers import fresh_outbox
from benchmarks.slow_link import slow_link
from benchmarks.table import Figure, Ratio, Row, milliseconds, paired, rate
from outbox_pipelines import consumer
from outbox_pipelines.settings import Settings

_EVENTS_ONE: Final = sized(500, 100)
_EVENTS_MANY: Final = sized(5000, 1000)
_ROUNDS: Final = sized(10, 2)
# Each way, of a database in another building.
_FAR_SECONDS: Final = 0.0005
_FAR_ROUNDS: Final = sized(2, 1)
# How a row calls what it is compared with.
_SHOWN: Final = {
    **dict.fromkeys(("bare", "bare, many"), "a loop that records nothing"),
    **dict.fromkeys(("textbook", "textbook, many"), "the textbook consumer"),
}
_Ways = Mapping[str, Callable[[Run], None]]


class _Figure(NamedTuple):
    """One run: events per second, and µs of the client's CPU per event."""

    rate: float
    cpu: float


_Figures = dict[str, list[_Figure]]


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with (
        fresh_outbox(servers) as settings,
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
        _redis(Path(folder)) as url,
    ):
        place = Place(settings, url)
        place.prepare()
        place.run(ONE["bare"], _EVENTS_ONE)
        figures: _Figures = {}
        for n in range(_ROUNDS):
            place.forget()
            for ways, events in (
                (ONE, _EVENTS_ONE),
                (MANY, _EVENTS_MANY),
                (AGAIN_ONE, _EVENTS_ONE),
                (AGAIN_MANY, _EVENTS_MANY),
            ):
                first = n % len(ways)
                for name in [*ways][first:] + [*ways][:first]:
                    figures.setdefault(name, []).append(place.run(ways[name], events))
        return [*_rows(figures), *_far(place)]


def _far(place: Place) -> list[Row]:
    """All come again, one at a time, and each word to the database takes its time."""
    figures: _Figures = {name: [] for name in AGAIN_ONE}
    with psycopg.connect(place.settings.dsn) as connection:
        port = connection.info.port
    with slow_link(port, _FAR_SECONDS) as far:
        dsn = psycopg.conninfo.make_conninfo(place.settings.dsn, port=far)
        away = _round_trip(dsn)
        for _ in range(_FAR_ROUNDS):
            for name, way in AGAIN_ONE.items():
                figures[name].append(place.run(way, _EVENTS_ONE, dsn))
    return [
        Row("round trip to a database in another building", (milliseconds(away),)),
        _row("delivered again, database in another building", figures, "again"),
        _row(
            "delivered again, database in another building, with the cache", figures, "again, cache", "again"
        ),
        _row("delivered again, database in another building, looked up", figures, "looked up", "again"),
    ]


def _round_trip(dsn: str) -> float:
    seconds = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(50):
            started = time.perf_counter()
            connection.execute("SELECT 1")
            seconds.append(time.perf_counter() - started)
    return median(seconds)


def _rows(of: _Figures) -> list[Row]:
    many, shared = f"{AT_ONCE} at a time", f"up to {AT_ONCE} share a transaction"
    return [
        _row("consumer, one at a time: a loop that records nothing", of, "bare"),
        _row("consumer, one at a time: textbook, ON CONFLICT DO NOTHING", of, "textbook", "bare"),
        _row("consumer, one at a time: each event once", of, "once", "bare", "textbook"),
        _row(f"consumer, {shared}: each event once", of, "shared", "bare", "textbook"),
        _row("consumer, one at a time: each event once, with the cache", of, "once, cache", "bare"),
        _row("consumer, one at a time: a loop that reads and writes Redis", of, "redis", "bare"),
        _row(f"consumer, {many}: a loop that records nothing", of, "bare, many"),
        _row(f"consumer, {many}: textbook, a multi-row INSERT", of, "textbook, many", "bare, many"),
        _row(f"consumer, {many}: each event once", of, "once, many", "bare, many", "textbook, many"),
        _row("delivered again, one at a time", of, "again", "once"),
        _row("delivered again, one at a time, with the cache", of, "again, cache", "again"),
        _row("delivered again, one at a time, looked up", of, "looked up", "again"),
        _row(f"delivered again, {many}", of, "again, many", "once, many"),
        _row(f"delivered again, {many}, with the cache", of, "again, many, cache", "again, many"),
        _row(f"delivered again, {many}, looked up", of, "looked up, many", "again, many"),
    ]


def _row(what: str, of: _Figures, name: str, *others: str) -> Row:
    figures = (
        rate([each.rate for each in of[name]]),
        Figure(median(each.cpu for each in of[name]), "µs of CPU in the client"),
    )
    rates = {each: [run.rate for run in of[each]] for each in (name, *others)}
    ratios = (Ratio(paired(rates[name], rates[other]), _SHOWN.get(other, other)) for other in others)
    return Row(what, figures, tuple(ratios))


@dataclass
class Place:
    """Where the ways run: a database, Kafka, Redis, and the ids of the events."""

    settings: Settings
    redis_url: str = ""
    ids: list[UUID] = field(default_factory=list)

    def prepare(self) -> None:
        with psycopg.connect(self.settings.dsn, autocommit=True) as connection:
            consumer.migrate(connection)
            connection.execute("CREATE TABLE invoices (order_id text NOT NULL, total int NOT NULL)")
            connection.execute(TEXTBOOK_TABLE.encode())
            made = connection.execute("SELECT uuidv7() FROM generate_series(1, %s)", [_EVENTS_MANY])
            self.ids = [event_id for (event_id,) in made]

    def forget(self) -> None:
        """Nothing was ever handled."""
        with psycopg.connect(self.settings.dsn, autocommit=True) as connection:
            connection.execute("TRUNCATE processed_events, textbook_processed, invoices")
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushall()

    def run(
        self,
        way: Callable[[Run], None],
        events: int,
        dsn: str = "",
        value: Callable[[int], str] = lambda n: json.dumps({"total": n % 100}),
    ) -> _Figure:
        """Run a way once.

        Args:
            dsn: leads to the database by another way.
            value: makes the n-th message.
        """
        topic = f"bench-{uuid.uuid4().hex[:8]}"
        run = Run(dsn or self.settings.dsn, self.settings.kafka, self.redis_url, topic, self.ids[:events])
        admin = AdminClient({"bootstrap.servers": self.settings.kafka})
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        # Idempotent: what is sent again must not put a mark behind its events.
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.settings.kafka, "enable.idempotence": True}
        )
        # The first ones are not timed: connections and plans are made there.
        marked = [(uuid.uuid4(), PLACED) for _ in range(5 * AT_ONCE)]
        marked += [(uuid.uuid4(), FIRST), *((each, PLACED) for each in run.ids), (uuid.uuid4(), LAST)]
        for n, (event_id, event_type) in enumerate(marked):
            headers: Any = [("id", str(event_id)), ("event-type", event_type), ("aggregate-type", "order")]
            producer.produce(topic, value(n), str(n % 500), headers=headers)
        assert producer.flush(60) == 0
        way(run)
        admin.delete_topics([topic])[topic].result(30)
        return _Figure(events / (run.ended - run.began), run.cpu / events * 1e6)


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
