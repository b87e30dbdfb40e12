"""A handler that commits: the server refuses it, and where it cannot, the event is a dead letter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from outbox_pipelines.consumer import Consumer, Counts, Event
from tests.conftest import either, wait_until
from tests.consumer import test_async
from tests.consumer.place import Place, at_work, effect, running, uuid7
from tests.consumer.test_transactions import sessions

INSERT = "INSERT INTO effects (event_id) VALUES ('x')"
Commit = Callable[[Any], object]
RAW = ("COMMIT", "COMMIT; BEGIN", "ROLLBACK", "ROLLBACK; BEGIN")


def spoiling(commit: Commit, *, passes_over: bool = False) -> Callable[[Any, Any], None]:
    """A handler that commits the first half of its work, and fails in the second."""

    def handle(_: object, transaction: Any) -> None:
        run = (
            transaction.execute
            if isinstance(transaction, psycopg.Connection)
            else lambda sql: transaction.execute(text(sql))
        )
        run(INSERT)
        with contextlib.suppress(*((Exception,) if passes_over else ())):
            commit(transaction)
        run(INSERT)
        if not passes_over:
            raise ValueError("the second half")

    return handle


def fails(place: Place, consumer: Consumer, group: str) -> None:
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted(group) == 0, what="its offset")
        assert run.end() == Counts(received=1, failures=1)
    [(state, error)] = place.rows("SELECT state, last_error FROM inbox WHERE source = %s", group)
    assert state == "waiting"
    if group.startswith("COMMIT"):
        assert " ended the transaction" in error


@pytest.mark.parametrize("passes_over", either(True, False))
def test_a_connection_cannot_be_committed(place: Place, passes_over: bool) -> None:
    """Guards against the first half of a handler's work, and an event that counts as handled."""
    place.send(uuid7())
    for sql in RAW:
        consumer = place.bare(sql, retry_seconds=300)
        consumer.on("order.placed")(
            spoiling(partial(lambda sql, it: it.execute(sql), sql), passes_over=passes_over)
        )
        fails(place, consumer, sql)
        assert place.effects() == 0, sql


@pytest.mark.extended
@pytest.mark.parametrize("driver", ["psycopg", pytest.param("psycopg2", marks=pytest.mark.extended)])
def test_a_session_cannot_be_committed(place: Place, driver: str) -> None:
    place.send(uuid7())
    ways: dict[str, Commit] = {
        "COMMIT of the session": lambda it: it.commit(),
        "COMMIT of its connection": lambda it: it.connection().commit(),
        "COMMIT of the driver": lambda it: it.connection().connection.dbapi_connection.commit(),
        "COMMIT in words": lambda it: it.execute(text("COMMIT")),
    }
    for batch in None, 10:
        for name, commit in ways.items():
            group = f"{name} {batch}"
            consumer = place.bare(group, retry_seconds=300, session=sessions(place, driver))
            consumer.on("order.placed", batch=batch)(spoiling(commit))
            fails(place, consumer, group)
            assert place.effects() == 0, group


@pytest.mark.extended
@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_an_asynchronous_one_cannot_be_committed(place: Place, driver: str) -> None:
    async def method(transaction: Any) -> None:
        await transaction.commit()

    async def words(transaction: Any) -> None:
        await test_async.run_sql(transaction, "COMMIT")

    async def scenario(commit: Any) -> None:
        async def spoils(event: Event, transaction: Any) -> None:
            await test_async.effect(event, transaction)
            await commit(transaction)
            await test_async.effect(event, transaction)
            raise ValueError("the second half")

        group = commit.__name__
        consumer = test_async.consumer(place, driver, spoils, source=group, retry_seconds=300)
        async with test_async.running(consumer.run) as counts:
            await test_async.until(lambda: place.uncommitted(group) == 0, "its offset")
        assert counts == [Counts(received=1, failures=1)]

    place.send(uuid7())
    for commit in method, words:
        asyncio.run(scenario(commit))
    assert place.effects() == 0
    for (error,) in place.rows("SELECT last_error FROM inbox"):
        assert " ended the transaction" in error or "forbidden within a Transaction" in error


@pytest.mark.extended
def test_a_message_of_the_inbox_cannot_be_settled_by_its_handler(place: Place) -> None:
    place.send(uuid7())
    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed")(spoiling(lambda it: it.execute("COMMIT")))
    with at_work(consumer, "receive"):
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
    assert consumer.drain(until_empty=True) == Counts(failures=1)
    assert place.inbox() == {"waiting": 1}
    assert place.effects() == 0


@pytest.mark.parametrize("batch", either(None, 10))
def test_what_was_committed_all_the_same_is_a_dead_letter(
    place: Place, batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an event that is taken for a duplicate, though half of its effects is missing."""
    place.rows("ALTER TABLE processed_events DISABLE TRIGGER handled_guard")
    place.rows("ALTER TABLE inbox DISABLE TRIGGER handled_guard")
    place.send(uuid7(), uuid7(), keys=1)
    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed", batch=batch)(spoiling(lambda it: it.execute("COMMIT")))
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
        assert run.end().dead_letters == 2
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 2
    for state, error in place.rows("SELECT state, last_error FROM inbox"):
        assert state == "failed"
        assert "committed part of its work and then failed" in error
    # An operator has checked them. Their ids are recorded, and yet they are no duplicates.
    place.rows("UPDATE inbox SET state = 'waiting', next_attempt_at = now()")
    assert place.consumer().drain(until_empty=True) == Counts(handled=2)


@pytest.mark.extended
@pytest.mark.parametrize("names", [{}, {"id": "event-id"}])
def test_what_was_committed_of_a_message_of_the_inbox_is_a_dead_letter_too(
    place: Place, names: dict[str, str]
) -> None:
    """Guards against a replay that takes the message for a duplicate, also if it has another id by now."""
    place.rows("ALTER TABLE processed_events DISABLE TRIGGER handled_guard")
    place.rows("ALTER TABLE inbox DISABLE TRIGGER handled_guard")
    place.put('{"n": 0}', id=str(uuid7()), event_id=str(uuid7()), event_type="order.placed")
    consumer = place.bare(retry_seconds=300)
    consumer.on("order.placed")(effect)
    with at_work(consumer, "receive"):
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
    consumer = place.bare(retry_seconds=300, header_names=names)
    consumer.on("order.placed")(spoiling(lambda it: it.execute("COMMIT")))
    assert consumer.drain(until_empty=True) == Counts(failures=1, dead_letters=1)
    [(state, error)] = place.rows("SELECT state, last_error FROM inbox")
    assert state == "failed"
    assert "committed part of its work and then failed" in error
    place.rows("UPDATE inbox SET state = 'waiting', next_attempt_at = now()")
    assert place.consumer(header_names=names).drain(until_empty=True) == Counts(handled=1)


def test_tables_without_the_guard_are_refused(place: Place) -> None:
    place.rows("DROP TRIGGER handled_guard ON processed_events")
    with running(place.consumer()) as run, pytest.raises(Exception, match="outbox consumer migrate"):
        run.wait()


def test_a_handler_may_check_its_own_constraints(place: Place) -> None:
    """Guards against deferred constraints that cannot be checked where the handler wants them checked."""
    place.rows("ALTER TABLE effects ADD CONSTRAINT once UNIQUE (event_id) DEFERRABLE INITIALLY DEFERRED")
    place.send(uuid7())
    consumer = place.bare()

    @consumer.on("order.placed")
    def handle(event: Event, connection: psycopg.Connection[Any]) -> None:
        effect(event, connection)
        connection.execute("SET CONSTRAINTS once IMMEDIATE")

    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="its offset")
        assert run.end() == Counts(handled=1)
