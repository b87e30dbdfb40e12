"""How fast a consumer drains a topic after a start: its last process ended cleanly, or the last two died.

Invariants:
- Both take turns with each size of a batch, and each run has a topic and a source of its own.
- Then the first events of each partition, as many as a batch, are handled one at a time. That takes
  its time once, however many events follow: its rate is compared, not that of the whole drain.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from statistics import median
from typing import Any, Final

import confluent_kafka
import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, rate
from outbox_pipelines import consumer
from outbox_pipelines.settings import Settings

_PARTITIONS: Final = 4
# How many events each size of a batch is measured with.
_EVENTS: Final = sized({1: 500, 100: 4000, 500: 4000}, {1: 100, 100: 1000, 500: 1000})
_BATCHES: Final = (100, 500)
_ROUNDS: Final = sized(3, 1)
_HANDLE: Final = "INSERT INTO invoices (order_id, total) VALUES (%s, %s)"
_LEAVE: Final = """
INSERT INTO partition_owners (source, consumer_group, topic, partition, owner, crashes)
SELECT %(topic)s, %(topic)s, %(topic)s, nth - 1, gen_random_uuid(), 1
FROM generate_series(1, %(partitions)s) AS nth"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rates: dict[tuple[int, bool], list[float]] = {}
    with fresh_outbox(servers) as settings:
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            consumer.migrate(connection)
            connection.execute("CREATE TABLE invoices (order_id text NOT NULL, total int NOT NULL)")
        for n in range(_ROUNDS):
            rates.setdefault((1, False), []).append(_rate(settings, 1, died=False))
            for batch in _BATCHES:
                for died in (True, False) if n % 2 else (False, True):
                    rates.setdefault((batch, died), []).append(_rate(settings, batch, died=died))
    single = median(rates[1, False])
    rows = [Row("consumer after a clean end, batch=1", (rate(single),))]
    for batch in _BATCHES:
        clean, killed = (median(rates[batch, each]) for each in (False, True))
        events, suspects = _EVENTS[batch], min(_EVENTS[batch], batch * _PARTITIONS)
        # Of all that is not suspect, as after a clean end.
        seconds = events / killed - (events - suspects) / clean
        rows += [
            Row(f"consumer after a clean end, batch={batch}", (rate(clean),)),
            Row(
                f"consumer after a second kill -9, batch={batch}",
                (Figure(suspects, "events one at a time"), Figure(seconds, "s"), rate(suspects / seconds)),
                (Ratio(suspects / seconds / single, "single events"),),
            ),
        ]
    return rows


def _rate(settings: Settings, batch: int, *, died: bool) -> float:
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": settings.kafka})
    admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])[topic].result(30)
    producer = confluent_kafka.Producer({"bootstrap.servers": settings.kafka})
    for n in range(_EVENTS[batch]):
        headers: Any = [
            ("id", str(uuid.uuid4())),
            ("event-type", "order.placed"),
            ("aggregate-type", "order"),
        ]
        producer.produce(topic, json.dumps({"total": n % 100}), str(n % 500), headers=headers)
    assert producer.flush(60) == 0
    if died:
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            connection.execute(_LEAVE, {"topic": topic, "partitions": _PARTITIONS})
    stop = threading.Event()
    times: list[float] = []
    handled = 0
    kafka = {"bootstrap.servers": settings.kafka}
    consumes = consumer.Consumer(source=topic, topics=[topic], kafka=kafka, dsn=settings.dsn)

    @consumes.on("order.placed", batch=batch)
    def placed(events: list[consumer.Event], connection: psycopg.Connection[Any]) -> None:
        nonlocal handled
        times.append(time.perf_counter())
        with connection.cursor() as cursor:
            cursor.executemany(_HANDLE, [(each.aggregate_id, each.payload["total"]) for each in events])
        handled += len(events)
        if handled == _EVENTS[batch]:
            times.append(time.perf_counter())
            stop.set()

    consumes.run(stop)
    admin.delete_topics([topic])[topic].result(30)
    return _EVENTS[batch] / (times[-1] - times[0])
