"""The publisher that textbooks show, on the table that they show: batches of 100, one commit a batch.

As a program: ``python -m benchmarks.textbook DSN KAFKA TOPIC EVENTS`` makes such a table with so many events,
publishes them, and prints events and seconds.
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
_CLAIM = """
SELECT id, aggregate_type, aggregate_id, event_type, payload FROM textbook_outbox
WHERE published_at IS NULL ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED"""
_MARK = "UPDATE textbook_outbox SET published_at = now() WHERE id = ANY (%s)"


def drain(dsn: str, kafka: str, topic: str, events: int) -> tuple[int, float]:
    """Publishes everything; events and seconds."""
    producer = Producer(
        {"bootstrap.servers": kafka, "acks": "all", "enable.idempotence": True, "compression.type": "lz4"}
    )
    producer.list_topics(topic, timeout=10)
    with psycopg.connect(dsn) as connection:
        connection.execute(TABLE.encode())
        connection.execute(FILL.format(events=events).encode())
        connection.commit()
        started = time.perf_counter()
        while batch := connection.execute(_CLAIM.encode()).fetchall():
            for _, kind, aggregate, event, payload in batch:
                headers = [("event-type", event), ("aggregate-type", kind)]
                producer.produce(topic, json.dumps(payload), aggregate, headers=headers, on_delivery=_check)
            producer.flush()
            connection.execute(_MARK, [[row[0] for row in batch]])
            connection.commit()
        return events, time.perf_counter() - started


def _check(error: object, message: Any) -> None:
    assert error is None, error


if __name__ == "__main__":
    drained, seconds = drain(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    print(drained, seconds)
