"""The relay takes over from the real Debezium: nothing twice and nothing lost."""

from __future__ import annotations

from pathlib import Path

import psycopg
from confluent_kafka.admin import NewTopic

from benchmarks import debezium
from benchmarks.debezium import Debezium
from outbox_pipelines.database import schema
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.relay import service
from outbox_pipelines.relay.start import start_at
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import fresh_database, read_topic, topic_prefix, wait_until
from tests.kafka_clients import AdminClient


def _write(dsn: str, first: int, events: int) -> None:
    with psycopg.connect(dsn) as connection:
        for n in range(first, first + events):
            emit(connection, "order", n % 7, "order.placed", {"n": n})
            connection.commit()


def _is_read(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT coalesce(bool_or(active), false) FROM pg_replication_slots"
        ).fetchone()
    return row == (True,)


def test_debezium_stops_and_the_relay_continues(stack: Stack, tmp_path: Path) -> None:
    """Guards against a takeover that repeats all events, or loses those that were written meanwhile."""
    topic = f"{topic_prefix()}-order-events"
    admin = AdminClient({"bootstrap.servers": stack.kafka})
    admin.create_topics([NewTopic(topic, 4, 1)])[topic].result(30)

    def ids() -> list[str | None]:
        return [message.headers["id"] for message in read_topic(stack.kafka, topic)]

    with postgres.Postgres(tmp_path / "postgres") as server, fresh_database(server.dsn) as dsn:
        settings = load_settings(dsn=dsn, kafka=stack.kafka, topic=topic)
        schema.migrate(settings)
        theirs = Debezium(
            dsn, stack.kafka, tmp_path / "debezium", {debezium.ROUTED: topic}, heap="256m", quick=True
        )
        theirs.start()
        try:
            _write(dsn, 0, 200)
            wait_until(lambda: len(ids()) == 200, seconds=60, what="all events out of Debezium")
        finally:
            theirs.stop()
        wait_until(lambda: not _is_read(dsn), what="the end of Debezium")
        _write(dsn, 200, 50)
        start = start_at(settings, f"slot:{theirs.slot}")
        assert start is not None
        assert start.skipped == 200
        service.relay(settings, until_empty=True)
        found = ids()
        theirs.remove()
    assert len(found) == len(set(found)) == 250
