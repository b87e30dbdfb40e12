"""The publisher that textbooks show, on the table that they show: batches of 100, one commit a batch.

As a program: ``python -m benchmarks.textbook DSN KAFKA TOPIC EVENTS`` makes such a table with so many events,
publishes them, and prints events and seconds. With ``update`` or ``delete`` in place of a number: publishes
what comes, without end, and marks or removes it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psycopg
from confluent_kafka import Producer

TABLE = """
DROP TABLE IF EXISTS textbook_outbox;
CREATE TABLE textbook_outbox (
    id bigserial PRIMARY KEY, aggregate_type text NOT NULL, aggregate_id text NOT NULL,
    event_type text NOT NULL, payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz,
    retry_count int NOT NULL DEFAULT 0
);
CREATE INDEX ON textbook_outbox (id) WHERE published_at IS NULL"""
FILL = """
INSERT INTO textbook_outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', (i % 20000)::text, 'order.placed',
       jsonb_build_object('number', i, 'customer', md5(i::text), 'state', 'placed',
                          'note', md5((i * 7)::text) || md5((i * 11)::text), 'total', i % 1000)
FROM generate_series(1, {events}) i"""
CLAIM = """
SELECT id, aggregate_type, aggregate_id, event_type, payload FROM textbook_outbox
WHERE published_at IS NULL ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED"""
_SETTLE = {
    "update": "UPDATE textbook_outbox SET published_at = now() WHERE id = ANY (%s)",
    "delete": "DELETE FROM textbook_outbox WHERE id = ANY (%s)",
}
_POLL_SECONDS = 0.01


def drain(dsn: str, kafka: str, topic: str, events: int) -> tuple[int, float]:
    """Publishes everything; events and seconds."""
    producer = _producer(kafka, topic)
    with psycopg.connect(dsn) as connection:
        connection.execute(TABLE.encode())
        connection.execute(FILL.format(events=events).encode())
        connection.commit()
        started = time.perf_counter()
        while _publish(connection, producer, topic, "update"):
            pass
        return events, time.perf_counter() - started


def run(dsn: str, kafka: str, topic: str, way: str) -> None:
    """Publishes what comes, until the process is ended."""
    producer = _producer(kafka, topic)
    with psycopg.connect(dsn) as connection:
        while True:
            if not _publish(connection, producer, topic, way):
                time.sleep(_POLL_SECONDS)


def _producer(kafka: str, topic: str) -> Producer:
    producer = Producer(
        {"bootstrap.servers": kafka, "acks": "all", "enable.idempotence": True, "compression.type": "lz4"}
    )
    producer.list_topics(topic, timeout=10)
    return producer


def _publish(connection: psycopg.Connection[Any], producer: Producer, topic: str, way: str) -> bool:
    """Publish a batch; return whether there was one."""
    batch = connection.execute(CLAIM.encode()).fetchall()
    if batch:
        for _, kind, aggregate, event, payload in batch:
            headers = [("event-type", event), ("aggregate-type", kind)]
            producer.produce(topic, json.dumps(payload), aggregate, headers=headers, on_delivery=_check)
        producer.flush()
        connection.execute(_SETTLE[way].encode(), [[row[0] for row in batch]])
    connection.commit()
    return bool(batch)


def _check(error: object, message: Any) -> None:
    assert error is None, error


if __name__ == "__main__":
    dsn, kafka, topic, what = sys.argv[1:]
    if what in _SETTLE:
        run(dsn, kafka, topic, what)
    else:
        print(*drain(dsn, kafka, topic, int(what)))
