"""Two open transactions with the same idempotency key: the second waits for what becomes of the first."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.conftest import wait_until
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

EMIT = "SELECT id, seq, duplicate FROM outbox_emit('order', '1', 'e', '{}', idempotency_key => %s)"
WRITTEN = "SELECT id, seq FROM outbox WHERE idempotency_key = %s"
INSERT = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, idempotency_key)
VALUES ('order', '1', 'e', '{}', %s) RETURNING seq"""
WAITS = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"


Sessions = tuple[Connection, Connection]


@pytest.fixture
def sessions(kept: Database) -> Iterator[Sessions]:
    with kept.connect(autocommit=False) as first, kept.connect(autocommit=False) as second:
        yield first, second


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return uuid.uuid4().hex


@contextmanager
def waiting(
    database: Database, connection: Connection, query: str, key: str
) -> Iterator[Future[tuple[Any, ...]]]:
    """Runs a query that waits for another transaction."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one, connection, query, key)
        wait_until(lambda: database.value(WAITS, connection.info.backend_pid), what="the second waiting")
        yield answer


def test_after_a_commit_it_is_a_duplicate(kept: Database, sessions: Sessions, key: str) -> None:
    """Two requests at once that both find the key free."""
    first, second = sessions
    written = one(first, EMIT, key)
    with waiting(kept, second, EMIT, key) as answer:
        first.commit()
        assert answer.result(20) == (written[0], None, True)
    second.commit()
    assert kept.rows(WRITTEN, key) == [written[:2]]


def test_after_a_rollback_it_is_written(kept: Database, sessions: Sessions, key: str) -> None:
    """A duplicate of an event that never came to be: nobody would have written it."""
    first, second = sessions
    lost = one(first, EMIT, key)
    with waiting(kept, second, EMIT, key) as answer:
        first.rollback()
        written = answer.result(20)
    second.commit()
    assert written[2] is False
    assert written[0] != lost[0]
    assert kept.rows(WRITTEN, key) == [written[:2]]


def test_a_snapshot_that_cannot_see_the_first_fails(kept: Database, sessions: Sessions, key: str) -> None:
    """REPEATABLE READ: 'duplicate' without the id of the first event, which this snapshot does not see."""
    first, second = sessions
    second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    one(second, "SELECT count(*) FROM outbox")
    one(first, EMIT, key)
    with waiting(kept, second, EMIT, key) as answer:
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            answer.result(20)
    second.rollback()
    assert one(second, EMIT, key)[2] is True


def test_a_plain_insert_waits_too(kept: Database, sessions: Sessions, key: str) -> None:
    """A check that cannot see what is not committed yet."""
    first, second = sessions
    written = insert(first, idempotency_key=key)
    with waiting(kept, second, INSERT, key) as answer:
        first.commit()
        with pytest.raises(psycopg.errors.UniqueViolation):
            answer.result(20)
    second.rollback()
    assert kept.rows(WRITTEN, key) == [written]
