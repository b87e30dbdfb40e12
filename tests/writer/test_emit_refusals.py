"""What `emit` refuses, before anything is sent: with a message that says what to do."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import sqlite3
import uuid
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from outbox_pipelines.writer import OutboxError, emit
from tests.schema.servers import Connection, Database
from tests.writer import targets

write: Any = emit


@pytest.mark.parametrize("name", ["aggregate_type", "aggregate_id", "event_type"])
@pytest.mark.parametrize("value", ["", None])
def test_names_that_are_missing(connection: Connection, name: str, value: object) -> None:
    """Events without a topic or a key; an event of the order 'None'."""
    names = {"aggregate_type": "order", "aggregate_id": "1", "event_type": "e"} | {name: value}
    with pytest.raises(OutboxError, match=f"{name} is {'None' if value is None else 'empty'}"):
        write(connection, *names.values(), {})


def test_an_empty_key(connection: Connection) -> None:
    """'' from a form or a header: the second event of the whole system would be a 'duplicate'."""
    with pytest.raises(OutboxError, match="idempotency_key is empty"):
        emit(connection, "order", 1, "e", {}, idempotency_key="")


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "payload",
    [
        {"at": datetime.datetime(2024, 1, 1)},
        {"total": decimal.Decimal("1.1")},
        {"id": uuid.UUID(int=1)},
        {"tags": {"a"}},
        {("a", "b"): 1},
        b"{}",
        float("nan"),
        {"n": [float("inf")]},
        CIRCLE,
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["payload", "headers"])
def test_what_is_not_json(connection: Connection, payload: object, where: str) -> None:
    """NaN, which Python writes and no consumer reads; a TypeError that does not say where it comes from."""
    content = {"payload": {}, "headers": None} | {where: payload if where == "payload" else {"h": payload}}
    with pytest.raises(OutboxError, match=f"{where} does not serialise to JSON: "):
        write(connection, "order", 1, "e", content["payload"], headers=content["headers"])


@pytest.mark.parametrize("headers", ["a", ["a"], [("a", "b", "c")], 1])
def test_headers_that_are_no_mapping(connection: Connection, headers: object) -> None:
    """A ValueError about 'dictionary update sequence element #0'."""
    with pytest.raises(OutboxError, match="headers"):
        write(connection, "order", 1, "e", {}, headers=headers)


def test_targets_of_another_kind(shared: Database) -> None:
    """An AttributeError from the depth, or an event written to a file that happens to have a cursor."""
    engine = targets.engine(shared)
    for target in (None, "dsn", sqlite3.connect(":memory:"), engine, orm.sessionmaker(engine)):
        with pytest.raises(
            OutboxError, match="give a psycopg connection or cursor, or a SQLAlchemy Session"
        ) as refused:
            write(target, "order", 1, "e", {})
        assert type(target).__qualname__ in str(refused.value)


def test_a_session_on_another_database() -> None:
    """SQLite in a unit test: a syntax error, or a complaint about autocommit."""
    with (
        orm.Session(sqlalchemy.create_engine("sqlite://")) as session,
        pytest.raises(OutboxError, match=r"sqlite.*PostgreSQL"),
    ):
        emit(session, "order", 1, "e", {})


def test_an_asynchronous_connection(shared: Database) -> None:
    """A coroutine that nobody awaits: the event is silently not written."""

    async def through_async() -> None:
        async with await psycopg.AsyncConnection.connect(shared.dsn) as connection:
            for target in (connection, connection.cursor()):
                with pytest.raises(OutboxError, match=r"psycopg.*Async.*give a psycopg connection"):
                    write(target, "order", 1, "e", {})

    asyncio.run(through_async())


def test_refused_before_anything_is_sent(connection: Connection) -> None:
    """A refusal that aborts the caller's transaction: they could not go on without the event."""
    with pytest.raises(OutboxError):
        emit(connection, "order", "", "e", {})
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    emit(connection, "order", 1, "e", {})
