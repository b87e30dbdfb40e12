"""The servers that are measured against: PostgreSQL that syncs its commits, a Kafka broker with a warm JVM.

Invariants:
- Real durability: fsync and synchronous_commit on.
- OUTBOX_DSN and OUTBOX_KAFKA are ignored: a benchmark never loads servers of yours.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from outbox_pipelines.database import schema
from outbox_pipelines.local import kafka, postgres
from outbox_pipelines.settings import Settings, load_settings

SHORT_LOG: Final = {
    "segment.bytes": "25000000",
    "retention.bytes": "50000000",
    "file.delete.delay.ms": "1000",
}
"""Settings of a topic whose past is not read, so that millions of events do not fill the disk."""
_POSTGRES = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_buffers": "1GB",
    # As much as a day's writing may take of the disk beside a large table.
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    # For Debezium, which sleeps while others are measured.
    "wal_level": "logical",
    "wal_sender_timeout": "0",
    # A fleet of 100 outboxes has two sessions in each, and those that write.
    "max_connections": "500",
}
# How often it removes what a topic need not keep.
_KAFKA: Final = {"log.retention.check.interval.ms": 5_000}


@contextmanager
def servers() -> Iterator[Settings]:
    """Settings that lead to both; everything is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
        postgres.Postgres(Path(folder) / "postgres", _POSTGRES) as database,
        kafka.Kafka(Path(folder) / "kafka", _KAFKA, heap="1g", quick=False) as broker,
    ):
        yield load_settings(dsn=database.dsn, kafka=broker.bootstrap)


@contextmanager
def fresh_outbox(settings: Settings, **topic_config: str) -> Iterator[Settings]:
    """A database of its own with a migrated outbox, and its topic `…-order` with 8 partitions."""
    name = f"bench_{uuid.uuid4().hex[:8]}"
    topic = f"{name}-order"
    admin = AdminClient({"bootstrap.servers": settings.kafka})
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        dsn = psycopg.conninfo.make_conninfo(settings.dsn, dbname=name)
        fresh = settings.model_copy(update={"dsn": dsn, "topic": name + "-{aggregate_type}"})
        schema.migrate(fresh)
        admin.create_topics([NewTopic(topic, 8, 1, config=topic_config)])[topic].result(30)
        try:
            yield fresh
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            admin.delete_topics([topic])[topic].result(30)


def fill(settings: Settings, events: int) -> None:
    """Committed events of about 200 B for 20,000 aggregates, in transactions of 1,000."""
    with psycopg.connect(settings.dsn) as connection:
        for first in range(1, events + 1, 100_000):
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "SELECT 'order', (i %% 20000)::text, 'order.placed', "
                "jsonb_build_object('number', i, 'customer', md5(i::text), 'state', 'placed', "
                "'note', md5((i * 7)::text) || md5((i * 11)::text), 'total', i %% 1000) "
                "FROM generate_series(%s::bigint, %s) i",
                [first, min(first + 99_999, events)],
            )
            connection.commit()
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE outbox")
        connection.execute("CHECKPOINT")


def rewind(settings: Settings) -> None:
    """Everything counts as not published again."""
    with psycopg.connect(settings.dsn) as connection:
        connection.execute(
            "UPDATE outbox_shards SET done = (m.tx || ':' || m.tx || ':')::pg_snapshot, target = NULL, "
            "last_seq = NULL FROM (SELECT min(tx::text::bigint) AS tx FROM outbox) m"
        )
        connection.execute("TRUNCATE outbox_progress")
