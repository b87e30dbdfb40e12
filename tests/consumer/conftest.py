"""A fresh place for each test, and databases for those that need no Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import psycopg
import pytest

from outbox_pipelines.consumer import migrate
from outbox_pipelines.local import Stack
from tests.conftest import Lasting, fresh_database, topic_prefix
from tests.consumer.place import Place
from tests.registry import registry
from tests.relay.topic import create
from tests.schema.servers import empty, server

__all__ = ["empty", "registry", "server"]


@contextmanager
def _template(stack: Stack) -> Iterator[str]:
    with fresh_database(stack.dsn) as dsn:
        with psycopg.connect(dsn) as connection:
            migrate(connection)
            connection.execute(
                "CREATE TABLE effects (seq bigserial, event_id text, key text, n int, by int DEFAULT "
                "pg_backend_pid())"
            )
        yield str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


@pytest.fixture
def place(stack: Stack, lasting: Lasting) -> Iterator[Place]:
    topic = f"{topic_prefix()}-order-events"
    create(stack.kafka, topic, 4)
    template = lasting.once(("consumer", datetime.now(UTC).date()), lambda: _template(stack))
    with fresh_database(stack.dsn, template) as dsn:
        yield Place(dsn, stack.kafka, topic)
