"""Two open transactions with the same idempotency key: the second waits for what becomes of the first."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from tests.conftest import wait_until
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

EMIT = "SELECT id, seq, duplicate FROM outbox_emit('order', '1', 'e', '{}', idempotency_key => %s)"
EMIT_MANY = """
SELECT id, seq, duplicate
FROM outbox_emit_many(jsonb_build_array(jsonb_build_object(
    'aggregate_type', 'order', 'aggregate_id', 1, 'event_type', 'e', 'payload', 1,
    'idempotency_key', %s::text)))"""
# The ids of the events that have these keys.
EMIT_LIST = """
SELECT array_agg(id) FROM outbox_emit_many((
    SELECT jsonb_agg(jsonb_build_object('aggregate_type', 'order', 'aggregate_id', 1, 'event_type', 'e',
                                        'payload', 1, 'idempotency_key', key) ORDER BY n)
    FROM unnest(%s::text[]) WITH ORDINALITY AS k (key, n)))"""
KEY = "SELECT outbox_key(%s)"
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
    database: Database, connection: Connection, query: str, key: object
) -> Iterator[Future[tuple[Any, ...]]]:
    """Runs a query that waits for another transaction."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one, connection, query, key)
        wait_until(lambda: database.value(WAITS, connection.info.backend_pid), what="the second waiting")
        yield answer


def test_after_a_commit_it_is_a_duplicate(kept: Database, sessions: Sessions, key: str) -> None:
    """Guards against two requests at once that both find the key free."""
    first, second = sessions
    written = one(first, EMIT, key)
    with waiting(kept, second, EMIT, key) as answer:
        first.commit()
        assert answer.result(600) == (written[0], None, True)
    second.commit()
    assert kept.rows(WRITTEN, key) == [written[:2]]


def test_after_a_rollback_it_is_written(kept: Database, sessions: Sessions, key: str) -> None:
    """Guards against a duplicate of an event that was rolled back: neither would have been written."""
    first, second = sessions
    lost = one(first, EMIT, key)
    with waiting(kept, second, EMIT, key) as answer:
        first.rollback()
        written = answer.result(600)
    second.commit()
    assert written[2] is False
    assert written[0] != lost[0]
    assert kept.rows(WRITTEN, key) == [written[:2]]


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
@pytest.mark.parametrize("query", [EMIT, EMIT_MANY], ids=["emit", "emit_many"])
@pytest.mark.parametrize("is_first_statement", [True, False])
def test_a_snapshot_that_cannot_see_the_first_fails(
    kept: Database, sessions: Sessions, key: str, level: str, query: str, is_first_statement: bool
) -> None:
    """Guards against 'duplicate' without the id of the first event, which this snapshot does not see; or a
    second event."""
    first, second = sessions
    second.isolation_level = psycopg.IsolationLevel[level]
    if not is_first_statement:
        one(second, "SELECT count(*) FROM outbox")
    one(first, EMIT, key)
    with waiting(kept, second, query, key) as answer:
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            answer.result(600)
    second.rollback()
    assert one(second, query, key)[2] is True


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_a_snapshot_after_a_rollback_writes(kept: Database, sessions: Sessions, key: str, level: str) -> None:
    """Guards against a serialization failure because of a transaction that was rolled back."""
    first, second = sessions
    second.isolation_level = psycopg.IsolationLevel[level]
    one(first, EMIT, key)
    with waiting(kept, second, EMIT, key) as answer:
        first.rollback()
        written = answer.result(600)
    second.commit()
    assert kept.rows(WRITTEN, key) == [written[:2]]


def test_single_emits_in_opposite_orders_deadlock(kept: Database, sessions: Sessions, key: str) -> None:
    """What is documented: PostgreSQL ends one of the two, and the other goes on with both of its events."""
    first, second = sessions
    one(first, EMIT, f"{key} a")
    one(second, EMIT, f"{key} b")
    with waiting(kept, first, EMIT, f"{key} b") as answer:
        outcomes = [_outcome(lambda: one(second, EMIT, f"{key} a")), _outcome(lambda: answer.result(600))]
    assert sorted(outcomes) == ["deadlock", "written"]


def _outcome(ask: Callable[[], tuple[Any, ...]]) -> str:
    try:
        return "duplicate" if ask()[2] else "written"
    except psycopg.errors.DeadlockDetected:
        return "deadlock"


def test_lists_in_opposite_orders_wait(kept: Database, sessions: Sessions, key: str) -> None:
    """Guards against keys claimed in the order of the list: each call waits for what the other one has."""
    first, second = sessions
    a, b, middle = sorted([f"{key} a", f"{key} b", f"{key} c"], key=lambda k: kept.value(KEY, k))
    with kept.connect(autocommit=False) as third:
        one(third, EMIT, middle)
        with (
            waiting(kept, first, EMIT_LIST, [a, middle, b]) as ours,
            waiting(kept, second, EMIT_LIST, [b, middle, a]) as theirs,
        ):
            third.rollback()
            written = ours.result(600)[0]
            first.commit()
            assert theirs.result(600)[0] == list(reversed(written))
    second.commit()
    assert kept.value("SELECT count(*) FROM outbox WHERE idempotency_key = ANY(%s)", [a, b, middle]) == 3


def test_a_plain_insert_waits_too(kept: Database, sessions: Sessions, key: str) -> None:
    """Guards against a check that cannot see what is not committed yet."""
    first, second = sessions
    written = insert(first, idempotency_key=key)
    with waiting(kept, second, INSERT, key) as answer:
        first.commit()
        with pytest.raises(psycopg.errors.UniqueViolation):
            answer.result(600)
    second.rollback()
    assert kept.rows(WRITTEN, key) == [written]
