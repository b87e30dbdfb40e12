"""What no relay in Python can exceed here: reading the rows alone, and giving them to librdkafka alone.

As a program: ``python -m benchmarks.limits read|produce DSN KAFKA TOPIC`` prints events and seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from confluent_kafka import Producer

from benchmarks.bones import PIECE, PRODUCER, READ

_ENDS = "SELECT min(seq), max(seq), max(tableoid)::regclass::text, pg_current_snapshot()::text FROM outbox"


def batches(dsn: str) -> Iterator[list[Any]]:
    """All rows, as the relay reads them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(_ENDS).fetchone()
        assert row is not None
        low, high, leaf, now = row
        connection.execute("SET jit = off")
        for last in range(low - 1, high, PIECE):
            with connection.cursor(binary=True) as cursor:
                cursor.execute(READ.format(leaf=leaf).encode(), [last, last + PIECE, now, "1:1:"])
                yield cursor.fetchall()


def read(dsn: str) -> tuple[int, float]:
    """Reads everything; events and seconds."""
    started = time.perf_counter()
    return sum(map(len, batches(dsn))), time.perf_counter() - started


def produce(dsn: str, kafka: str, topic: str) -> tuple[int, float]:
    """Produces everything out of the memory, with headers and without a callback; events and seconds."""
    rows = [row for batch in batches(dsn) for row in batch]
    producer = Producer({"bootstrap.servers": kafka, **PRODUCER, "queue.buffering.max.messages": len(rows)})
    producer.list_topics(topic, timeout=10)
    started = time.perf_counter()
    for _seq, name, kind, aggregate, event, payload in rows:
        headers = [("id", name), ("event-type", event), ("aggregate-type", kind)]
        producer.produce(topic, payload, aggregate, headers=headers)
    producer.flush()
    return len(rows), time.perf_counter() - started


if __name__ == "__main__":
    which, dsn, *place = sys.argv[1:]
    print(*(read(dsn) if which == "read" else produce(dsn, *place)))
