"""A fresh place for each test, and databases for those that need no Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_pipelines.consumer import migrate
from outbox_pipelines.local import Stack
from tests.conftest import fresh_database, topic_prefix
from tests.consumer.place import Place
from tests.schema.servers import empty, server

__all__ = ["empty", "server"]


@pytest.fixture
def place(stack: Stack) -> Iterator[Place]:
    topic = f"{topic_prefix()}-order-events"
    admin = AdminClient({"bootstrap.servers": stack.kafka})
    admin.create_topics([NewTopic(topic, 4, 1)])[topic].result(60)
    with fresh_database(stack.dsn) as dsn:
        with psycopg.connect(dsn) as connection:
            migrate(connection)
            connection.execute(
                "CREATE TABLE effects (seq bigserial, event_id text, key text, n int, by int DEFAULT "
                "pg_backend_pid())"
            )
        yield Place(dsn, stack.kafka, topic)
