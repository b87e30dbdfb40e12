"""The relay's loop stripped to its bones: the reference that the real one is held against.

The same reading (between two snapshots, by batches of 5,000, one ahead), the same messages (key, three
headers, a callback each), one UPDATE a batch. It has no ownership, no heartbeat, no bound on memory,
no late transactions, no routing, no errors, no progress.

As a program: ``python -m benchmarks.bones DSN KAFKA TOPIC`` prints events and seconds.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import psycopg
from confluent_kafka import Producer

PIECE = 5000
READ = """
SELECT seq, id::text, aggregate_type, aggregate_id, event_type, payload::text FROM {leaf}
WHERE seq > %s AND seq <= %s
  AND pg_visible_in_snapshot(tx, %s::pg_snapshot) AND NOT pg_visible_in_snapshot(tx, %s::pg_snapshot)
ORDER BY seq"""
PRODUCER: dict[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "compression.type": "lz4",
    "linger.ms": 5,
    "batch.num.messages": 10_000,
    "partitioner": "murmur2_random",
}


def drain(dsn: str, kafka: str, topic: str) -> tuple[int, float]:
    """Publishes everything; events and seconds."""
    connection = psycopg.connect(dsn, autocommit=True)
    done, target = _one(connection, "SELECT done::text, pg_current_snapshot()::text FROM outbox_shards")
    low, high, leaf = _one(connection, "SELECT min(seq), max(seq), max(tableoid)::regclass::text FROM outbox")
    producer = Producer({"bootstrap.servers": kafka, **PRODUCER})
    producer.list_topics(topic, timeout=10)
    batches: queue.Queue[list[Any] | None] = queue.Queue(2)

    def read() -> None:
        with psycopg.connect(dsn, autocommit=True) as reader:
            reader.execute("SET jit = off")
            for last in range(low - 1, high, PIECE):
                with reader.cursor(binary=True) as cursor:
                    cursor.execute(READ.format(leaf=leaf).encode(), [last, last + PIECE, target, done])
                    batches.put(cursor.fetchall())
        batches.put(None)

    acknowledged = 0

    def report(error: object, message: object) -> None:
        nonlocal acknowledged
        assert error is None, error
        acknowledged += 1

    started = time.perf_counter()
    threading.Thread(target=read, daemon=True).start()
    sent = 0
    flying: list[tuple[int, int]] = []
    while (rows := batches.get()) is not None:
        for _seq, name, kind, aggregate, event, payload in rows:
            headers = [("id", name), ("event-type", event), ("aggregate-type", kind)]
            producer.produce(topic, payload, aggregate, on_delivery=report, headers=headers)
            sent += 1
            if not sent % 1000:
                producer.poll(0)
        flying.append((sent, rows[-1][0]))
        while len(flying) > 6 and acknowledged < flying[0][0]:
            producer.poll(0.05)
        while flying and acknowledged >= flying[0][0]:
            connection.execute(
                "UPDATE outbox_shards SET target = %s, last_seq = %s", [target, flying.pop(0)[1]]
            )
    producer.flush()
    connection.execute("UPDATE outbox_shards SET done = %s, target = NULL, last_seq = NULL", [target])
    return sent, time.perf_counter() - started


def _one(connection: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    (row,) = connection.execute(query.encode()).fetchall()
    return tuple(row)


if __name__ == "__main__":
    events, seconds = drain(*sys.argv[1:4])
    print(events, seconds)
