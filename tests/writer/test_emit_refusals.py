"""What is refused before anything is sent: with a message that says what to do."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import asyncpg
import django.core.cache
import psycopg
import pytest
import sqlalchemy
from django.db import connections
from django.utils.connection import ConnectionProxy
from sqlalchemy import orm

from outbox_pipelines.writer import (
    AutocommitError,
    NewEvent,
    OutboxError,
    PayloadTooLargeError,
    emit,
    emit_many,
    statements,
)
from tests.schema.servers import Connection, Database
from tests.writer import targets

write: Any = emit


@pytest.mark.parametrize("name", ["aggregate_type", "aggregate_id", "event_type"])
@pytest.mark.parametrize("value", ["", None])
def test_names_that_are_missing(connection: Connection, name: str, value: object) -> None:
    """Guards against events without a topic or a key; an event of the order 'None'."""
    names = {"aggregate_type": "order", "aggregate_id": "1", "event_type": "e"} | {name: value}
    with pytest.raises(OutboxError, match=f"{name} is {'None' if value is None else 'empty'}") as refused:
        write(connection, *names.values(), {})
    # Only of an id it is the likely reason that the database has not drawn it yet.
    assert ("flush" in str(refused.value)) is (name == "aggregate_id" and value is None)


def test_an_empty_key(connection: Connection) -> None:
    """Guards against '' from a form or a header: the system's second event would be a 'duplicate'."""
    with pytest.raises(OutboxError, match="idempotency_key is empty"):
        emit(connection, "order", 1, "e", {}, idempotency_key="")


def test_long_headers(connection: Connection) -> None:
    """Guards against a refusal by the database, which aborts the transaction."""
    emit(connection, "order", 1, "e", {}, headers={"a": "x" * 99_980})
    with pytest.raises(OutboxError, match=r"headers have 100,009 bytes as JSON, more than 100,000"):
        emit(connection, "order", 1, "e", {}, headers={"a": "x" * 100_000})


TEXTS = ["aggregate_type", "aggregate_id", "event_type", "idempotency_key", "correlation_id", "causation_id"]


@pytest.mark.parametrize("column", TEXTS)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\0b", "NUL character"),
        ("a\ud83d", "surrogate"),
        (b"a", "type bytes: give text"),
        ("é" * 5_001, "10,002 bytes"),
    ],
    ids=["NUL", "surrogate", "bytes", "long"],
)
def test_what_is_no_text(connection: Connection, column: str, text: object, why: str) -> None:
    """Guards against an error of the driver's internals, or of the database, which aborts the transaction; a
    key "b'a'"."""
    wrong: dict[str, Any] = {column: text}
    event = NewEvent("order", 1, "e", {})._replace(**wrong)
    with pytest.raises(OutboxError, match=f"{column} .*{why}"):
        write(connection, **event._asdict())


@pytest.mark.parametrize("column", ["aggregate_type", "event_type", "idempotency_key", "correlation_id"])
def test_numbers_where_text_belongs(connection: Connection, column: str) -> None:
    """Guards against arguments that changed places: a topic called 42-events."""
    wrong: dict[str, Any] = {column: 42}
    event = NewEvent("order", 1, "e", {})._replace(**wrong)
    with pytest.raises(OutboxError, match=f"{column} is of type int: give text"):
        write(connection, **event._asdict())


@pytest.mark.parametrize("version", [2**31, -(2**31) - 1, "1", 1.0])
def test_versions_that_do_not_fit(connection: Connection, version: object) -> None:
    """Guards against an error of the database, which aborts the transaction."""
    with pytest.raises(OutboxError, match=r"version is .*32 bits"):
        write(connection, "order", 1, "e", {}, version=version)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "trace",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n",
    ],
)
def test_traceparents_that_are_none(connection: Connection, traceparent: str) -> None:
    """Guards against a trace that ends at the outbox without an explanation."""
    with pytest.raises(OutboxError, match=r"traceparent .*W3C"):
        emit(connection, "order", 1, "e", {}, traceparent=traceparent)


@pytest.mark.parametrize("headers", ["a", ["a"], [("a", "b", "c")], 1])
def test_headers_that_are_no_mapping(connection: Connection, headers: object) -> None:
    """Guards against a ValueError about 'dictionary update sequence element #0'."""
    with pytest.raises(OutboxError, match=r"headers are a .*: give a mapping"):
        write(connection, "order", 1, "e", {}, headers=headers)


def test_targets_of_another_kind(shared: Database) -> None:
    """Guards against an AttributeError from library code, or an event written to a file that happens to have
    a cursor."""
    engine = targets.engine(shared)
    pool = psycopg.Connection  # the class, as given by a mistaken dependency
    for target in (None, "dsn", sqlite3.connect(":memory:"), engine, orm.sessionmaker(engine), pool):
        with pytest.raises(OutboxError, match=r"cannot write through .*: pass a connection") as refused:
            write(target, "order", 1, "e", {})
        assert type(target).__qualname__ in str(refused.value)


def test_a_session_on_another_database() -> None:
    """Guards against a syntax error, or a complaint about autocommit, for SQLite in a unit test."""
    with (
        orm.Session(sqlalchemy.create_engine("sqlite://")) as session,
        pytest.raises(OutboxError, match=r"sqlite.*PostgreSQL"),
    ):
        emit(session, "order", 1, "e", {})


def test_djangos_other_connections(shared: Database) -> None:
    """Guards against an event for SQLite in Django's tests, or for a cache, whose proxies are of the same
    class."""
    with targets.django_wrapper(shared):
        connections.settings["lite"] = {
            **connections.settings["default"],
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": ":memory:",
        }
        cache = ConnectionProxy(django.core.cache.caches, "default")
        for target in (connections["lite"], cache):
            with pytest.raises(OutboxError, match=r"leads to .*: the outbox needs PostgreSQL"):
                write(target, "order", 1, "e", {})


def test_a_pool(shared: Database) -> None:
    """Guards against a pool of asyncpg, which would use any connection: not the one of the business rows."""

    async def through_pool() -> None:
        with pytest.raises(OutboxError, match=r"asyncpg\.pool\.Pool: pass a connection"):
            await write(asyncpg.create_pool(), "order", 1, "e", {})

    asyncio.run(through_pool())


def test_it_is_refused_before_anything_is_sent(connection: Connection) -> None:
    """Guards against a refusal that aborts the caller's transaction: it could not go on without the event."""
    with pytest.raises(OutboxError):
        emit(connection, "order", "", "e", {})
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    emit(connection, "order", 1, "e", {})


def test_a_session_is_not_flushed_for_what_is_refused(shared: Database) -> None:
    """Guards against business rows that are sent, and constraints that fail, before a mistake in the
    event."""
    with targets.session(shared) as through:
        flushed: list[object] = []
        sqlalchemy.event.listen(through.target, "before_flush", lambda *arguments: flushed.append(arguments))
        with pytest.raises(OutboxError):
            through.emit("order", "", "e", {})
    assert flushed == []


@pytest.mark.parametrize("kind", [targets.async_connection, targets.async_session_asyncpg])
def test_content_is_refused_without_awaiting(shared: Database, kind: targets.Target) -> None:
    """Guards against a task that fails later, far from the call that made the mistake."""
    with kind(shared) as through, pytest.raises(OutboxError):
        write(through.target, "order", "", "e", {})


def test_no_event_is_sent_where_one_is_refused(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against half a list, and a message that does not say which event of a thousand it is about."""
    # Each event alone, as those of a list of 64 MB.
    monkeypatch.setattr(statements, "_PIECE", 1)
    events = [NewEvent("order", 1, "e", {})] * 2
    for wrong, error in [
        (NewEvent("order", None, "e", {}), OutboxError),
        (NewEvent("order", 1, "e", "x" * 1_000_001), PayloadTooLargeError),
        (("order", 1, "e", {}), OutboxError),
    ]:
        with pytest.raises(error, match=r"^event 2"):
            emit_many(connection, [*events, wrong, *events])  # type: ignore[list-item]
    assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (0,)


def test_one_event_where_many_belong(connection: Connection) -> None:
    """Guards against an event, which is a tuple, taken for a list of events."""
    write_many: Any = emit_many
    with pytest.raises(OutboxError, match="given one NewEvent: give a list of events"):
        write_many(connection, NewEvent("order", 1, "e", {}))


def test_the_kinds_of_refusal() -> None:
    """Guards against an application that catches OutboxError and misses one."""
    assert issubclass(AutocommitError, OutboxError)
    assert issubclass(PayloadTooLargeError, OutboxError)
