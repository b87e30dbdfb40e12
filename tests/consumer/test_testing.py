"""What an application tests its handlers with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker

from outbox_pipelines.consumer import AsyncConsumer, Consumer, Event, OutageError, RefusedError, migrate
from outbox_pipelines.consumer.testing import handle, handle_async, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import Stack
from tests.conftest import fresh_database
from tests.consumer import test_async
from tests.consumer.place import Place, effect
from tests.consumer.test_transactions import sessions

KAFKA = {"bootstrap.servers": "broker:9092"}
BAD = make_event("order.placed", {"n": 13})


@pytest.fixture(scope="module")
def place(stack: Stack) -> Iterator[Place]:
    """A database with the tables, which no test leaves anything in."""
    with fresh_database(stack.dsn) as dsn:
        with psycopg.connect(dsn) as connection:
            migrate(connection)
            connection.execute("CREATE TABLE effects (seq bigserial, event_id text, key text, n int)")
        yield Place(dsn, "", "")
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT count(*) FROM effects").fetchone() == (0,)
            assert connection.execute("SELECT count(*) FROM processed_events").fetchone() == (0,)


def consumer(**more: Any) -> Consumer:
    # A database and a Kafka that are not there: neither is connected to.
    made = Consumer(source="billing", topics=["t"], kafka=KAFKA, dsn="host=none.invalid", **more)

    @made.on("order.placed")
    def placed(event: Event, transaction: Any) -> None:
        if isinstance(transaction, psycopg.Connection):
            effect(event, transaction)
        elif transaction is not None:
            transaction.execute(text(f"INSERT INTO effects (event_id) VALUES ('{event.id}')"))
        if event.payload["n"] == 13:
            raise KeyError("thirteen")

    return made


def test_an_event_has_what_a_test_needs_not_say() -> None:
    event = make_event("order.placed", {"total": 5}, aggregate_id=42, headers={"tenant": "acme"})
    assert (event.type, event.payload, event.aggregate_id) == ("order.placed", {"total": 5}, "42")
    assert event.headers == {"tenant": "acme"}
    assert event.id != make_event("order.placed").id
    assert make_event("order.deleted").payload is None
    assert make_event("e", value=b'{"n": 1}').payload == {"n": 1}


def test_without_a_database() -> None:
    """The handler is called with what the test has, and nothing is remembered."""
    event = make_event("order.placed", {"n": 1})
    for _ in range(2):
        assert handle(consumer(), event, using=None) == ["handled"]
    assert handle(consumer(), make_event("order.seen"), using=None) == ["ignored"]
    with pytest.raises(KeyError, match="thirteen"):
        handle(consumer(), BAD, using=None)


@pytest.mark.parametrize("wrong", [{"type": "order.placed"}, [BAD], None])
def test_what_is_no_event(wrong: Any) -> None:
    """Guards against an AttributeError from within the library: `dict has no attribute topic`."""
    with pytest.raises(SetupError, match=r"given a \w+ where an event belongs: .*make_event"):
        handle(consumer(), wrong, using=None)


def test_a_connection_in_the_tests_own_transaction(place: Place) -> None:
    """Guards against a test that commits, and one that records differently from a consumer."""
    event = make_event("order.placed", {"n": 1}, aggregate_id=42)
    with psycopg.connect(place.dsn) as connection:
        assert handle(consumer(), event, using=connection) == ["handled"]
        assert handle(consumer(), event, using=connection) == ["duplicate"]
        assert connection.execute("SELECT key, n FROM effects").fetchall() == [("42", 1)]
        assert place.effects() == 0
        with pytest.raises(KeyError):
            handle(consumer(), BAD, using=connection)
        # What the handler did is taken back, and the test goes on.
        assert connection.execute("SELECT count(*) FROM effects").fetchone() == (1,)
        connection.rollback()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_session_in_the_tests_own_transaction(place: Place, driver: str) -> None:
    event = make_event("order.placed", {"n": 1})
    with sessions(place, driver)() as session:
        assert handle(consumer(), event, event, using=session) == ["handled", "duplicate"]
        with pytest.raises(KeyError):
            handle(consumer(), BAD, using=session)
        assert session.execute(text("SELECT event_id FROM effects")).all() == [(event.id,)]
        session.rollback()


@pytest.mark.parametrize("driver", test_async.EITHER_DRIVER)
def test_asynchronous_ones(place: Place, driver: str) -> None:
    made = AsyncConsumer(source="billing", topics=["t"], kafka=KAFKA, dsn="")

    @made.on("order.placed")
    async def placed(event: Event, transaction: Any) -> None:
        await test_async.effect(event, transaction)
        if event.payload["n"] == 13:
            raise KeyError("thirteen")

    async def scenario(using: Any) -> None:
        event = make_event("order.placed", {"n": 1})
        assert await handle_async(made, event, using=using) == ["handled"]
        assert await handle_async(made, event, using=using) == ["duplicate"]
        with pytest.raises(KeyError):
            await handle_async(made, BAD, using=using)
        assert await handle_async(made, BAD, using=using, raises=False) == ["retry"]
        await using.rollback()

    async def with_its_own() -> None:
        given = test_async.database(place, driver)
        if driver == "connection":
            async with await psycopg.AsyncConnection.connect(place.dsn) as connection:
                await scenario(connection)
        else:
            make: async_sessionmaker[Any] = given["session"]
            async with make() as session:
                await scenario(session)

    asyncio.run(with_its_own())


def test_the_result_for_an_exception(place: Place) -> None:
    errors: dict[str, BaseException] = {
        "retry": ValueError("x"),
        "dead_letter": RefusedError("x"),
        "outage": OutageError("x"),
    }
    made = Consumer(
        source="billing",
        topics=["t"],
        kafka=KAFKA,
        dsn="",
        on_error={KeyError: "dead_letter"},
        outage_after=1,
    )

    @made.on_other
    def fails(event: Event, connection: object) -> None:
        raise errors.get(event.type) or KeyError("x")

    for verdict in errors:
        # Each for itself: no breaker is open after an outage.
        assert handle(made, make_event(verdict), using=None, raises=False) == [verdict]
    with psycopg.connect(place.dsn) as connection:
        assert handle(made, make_event("e"), using=connection, raises=False) == ["dead_letter"]
        assert connection.execute("SELECT count(*) FROM inbox").fetchone() == (0,)
        connection.rollback()


def test_a_batch(place: Place) -> None:
    made = Consumer(source="billing", topics=["t"], kafka=KAFKA, dsn="")
    sizes: list[int] = []

    @made.on("order.placed", batch=3)
    def placed(events: list[Event], connection: psycopg.Connection[Any]) -> None:
        sizes.append(len(events))
        for event in events:
            effect(event, connection)
        if any(event.payload["n"] == 13 for event in events):
            raise KeyError("thirteen")

    events = [make_event("order.placed", {"n": n}) for n in range(4)]
    with psycopg.connect(place.dsn) as connection:
        assert handle(made, *events, events[0], using=connection) == ["handled"] * 4 + ["duplicate"]
        assert sizes == [3, 1]
        with pytest.raises(KeyError):
            handle(made, BAD, make_event("order.placed", {"n": 5}), using=connection)
        third = make_event("order.placed", {"n": 6})
        assert handle(made, BAD, third, using=connection, raises=False) == ["retry", "handled"]
        connection.rollback()


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
def test_a_handler_that_ends_the_transaction_fails(place: Place, statement: str) -> None:
    """Guards against a test that passes where production fails."""
    made = Consumer(source="billing", topics=["t"], kafka=KAFKA, dsn="")

    @made.on("e")
    def ends(event: Event, connection: psycopg.Connection[Any]) -> None:
        connection.execute(statement.encode())

    with psycopg.connect(place.dsn) as connection:
        with pytest.raises(Exception, match="the handler ended the transaction"):
            handle(made, make_event("e"), using=connection)
        connection.rollback()


def test_what_cannot_be_used_is_refused(place: Place) -> None:
    """Guards against a test that believes that its events are recorded."""
    import psycopg2

    asynchronous = AsyncConsumer(source="billing", topics=["t"], kafka=KAFKA, dsn="")
    with pytest.raises(SetupError, match="handle_async"):
        handle(asynchronous, using=None)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="no handler"):
        asyncio.run(handle_async(asynchronous, using=None))
    with pytest.raises(SetupError, match="give what the handlers get"):
        handle(consumer(), BAD, using=psycopg2.connect(place.dsn))
    with psycopg.connect(place.dsn) as connection:
        connection.execute("SET LOCAL search_path = pg_catalog")
        with pytest.raises(SetupError, match="tables do not exist"):
            handle(consumer(), BAD, using=connection)
        connection.rollback()
