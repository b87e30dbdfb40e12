"""Two open transactions with the same idempotency key: the second waits for what becomes of the first."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.conftest import wait_until
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

EMIT = (
    "SELECT id, seq, duplicate FROM outbox_emit('order', '42', 'order.placed', '{}', idempotency_key => 'k')"
)
WAITS = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"


@pytest.fixture
def sessions(database: Database) -> Iterator[tuple[Connection, Connection]]:
    with database.connect(autocommit=False) as first, database.connect(autocommit=False) as second:
        yield first, second


@contextmanager
def waiting(
    database: Database, connection: Connection, query: str = EMIT
) -> Iterator[Future[tuple[Any, ...]]]:
    """Runs a query that waits for another transaction."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one, connection, query)
        wait_until(lambda: database.value(WAITS, connection.info.backend_pid), what="the second waiting")
        yield answer


def test_after_a_commit_it_is_a_duplicate(
    database: Database, sessions: tuple[Connection, Connection]
) -> None:
    """Two requests at once that both find the key free."""
    first, second = sessions
    written = one(first, EMIT)
    with waiting(database, second) as answer:
        first.commit()
        assert answer.result(20) == (written[0], None, True)
    second.commit()
    assert database.value("SELECT count(*) FROM outbox") == 1


def test_after_a_rollback_it_is_written(database: Database, sessions: tuple[Connection, Connection]) -> None:
    """A duplicate of an event that never came to be: nobody would have written it."""
    first, second = sessions
    lost = one(first, EMIT)
    with waiting(database, second) as answer:
        first.rollback()
        written = answer.result(20)
    second.commit()
    assert written[2] is False
    assert written[0] != lost[0]
    assert database.rows("SELECT id, seq FROM outbox") == [written[:2]]


def test_a_snapshot_that_cannot_see_the_first_fails(
    database: Database, sessions: tuple[Connection, Connection]
) -> None:
    """REPEATABLE READ: 'duplicate' without the id of the first event, which this snapshot does not see."""
    first, second = sessions
    second.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    one(second, "SELECT count(*) FROM outbox")
    one(first, EMIT)
    with waiting(database, second) as answer:
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            answer.result(20)
    second.rollback()
    assert one(second, EMIT)[2] is True


def test_a_plain_insert_waits_too(database: Database, sessions: tuple[Connection, Connection]) -> None:
    """A check that cannot see what is not committed yet."""
    first, second = sessions
    insert(first, idempotency_key="k")
    query = (
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, idempotency_key) "
        "VALUES ('order', '1', 'e', '{}', 'k') RETURNING seq"
    )
    with waiting(database, second, query) as answer:
        first.commit()
        with pytest.raises(psycopg.errors.UniqueViolation):
            answer.result(20)
    second.rollback()
    assert database.value("SELECT count(*) FROM outbox") == 1
