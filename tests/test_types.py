"""The types of the writer and of the consumer, as mypy sees them in an application: in one run of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outbox_pipelines.catalog.classes import classes
from outbox_pipelines.catalog.document import read_catalog

# `make lint` checks the same calls, in the suite and the examples.
pytestmark = [pytest.mark.slow, pytest.mark.extended]

RIGHT = """
from collections.abc import Coroutine
from dataclasses import dataclass
from uuid import UUID
from typing import Any
import psycopg
import sqlalchemy
from psycopg.rows import DictRow
from sqlalchemy import orm
from sqlalchemy.ext import asyncio
from outbox_pipelines.writer import Emitted, NewEvent, correlated, derive_key, emit, emit_many
from outbox_pipelines.writer.testing import WrittenEvent, assert_emitted, captured, events_of
from order_events import OrderPaid, OrderPlaced

@dataclass(frozen=True)
class Placed:
    __event_type__ = "order.placed"
    __aggregate_type__ = "order"
    __aggregate_id__ = "order_id"
    order_id: int

def write(
    connection: psycopg.Connection,
    dicts: psycopg.Connection[DictRow],
    cursor: psycopg.Cursor[tuple[Any, ...]],
    raw: psycopg.RawCursor[DictRow],
    core: sqlalchemy.Connection,
    session: orm.Session,
    scoped: orm.scoped_session[orm.Session],
) -> UUID:
    emit(connection, "order", 1, "e", {"a": [1]})
    typed: Emitted = emit(connection, Placed(1), idempotency_key="k")
    emit_many(connection, [Placed(1), NewEvent("order", 1, "e", {})])
    typed = emit(connection, OrderPlaced(order_id=1, currency="EUR", coupon=None), idempotency_key="k")
    typed = emit(session, OrderPaid(), aggregate_id=1)
    emit(dicts, "order", UUID(int=1), "e", None, headers={"h": 1})
    emit(cursor, "order", "1", "e", [], idempotency_key="k", version=1)
    emit(raw, "order", "1", "e", [])
    emit(core, "order", "1", "e", 5, correlation_id="c", causation_id=UUID(int=1), traceparent="t")
    emit(session, "order", "1", "e", "text", idempotency_key=derive_key(1, "e", {}))
    emitted: Emitted = emit(scoped, "order", "1", "e", {})
    seq: int | None = emitted.seq
    duplicate: bool = emitted.duplicate
    with correlated(correlation_id="c", causation_id=emitted.id):
        many: list[Emitted] = emit_many(session, (NewEvent("order", n, "e", {}, version=n) for n in range(3)))
    written: list[WrittenEvent] = [*events_of(connection), *events_of(scoped)]
    with captured() as events:
        event: WrittenEvent = assert_emitted(events + written, "e", aggregate_id=1, payload={"a": ...})
    return many[0].id or event.id

async def write_later(
    connection: psycopg.AsyncConnection,
    cursor: psycopg.AsyncCursor[DictRow],
    core: asyncio.AsyncConnection,
    session: asyncio.AsyncSession,
    scoped: asyncio.async_scoped_session[asyncio.AsyncSession],
) -> UUID:
    emitted: Emitted = await emit(connection, "order", 1, "e", {"a": [1]})
    await emit(cursor, "order", 1, "e", {}, headers={"h": 1})
    await emit(core, "order", 1, "e", {}, idempotency_key="k")
    later: Coroutine[Any, Any, Emitted] = emit(session, "order", 1, "e", {})
    await later
    typed: Emitted = await emit(connection, Placed(1))
    typed = await emit(session, OrderPlaced(order_id=1, currency="EUR"))
    typed = await emit(session, OrderPaid(), aggregate_id=1)
    many: list[Emitted] = await emit_many(scoped, [NewEvent("order", 1, "e", {})])
    written: list[WrittenEvent] = await events_of(session)
    return emitted.id or written[0].id
"""
# An application without any of the drivers: what it uses instead is its own.
ALONE = """
from outbox_pipelines.writer import Emitted, emit

class Connection:
    def is_in_transaction(self) -> bool:
        return True

    async def close(self, *, timeout: float | None = None) -> None:
        pass

class Wrapper:
    in_atomic_block: bool

    def cursor(self) -> object:
        return self

async def write(asyncpg: Connection, django: Wrapper) -> None:
    later: Emitted = await emit(asyncpg, "order", 1, "e", {})
    now: Emitted = emit(django, "order", 1, "e", {})
    emit(5, "order", 1, "e", {})  # type: ignore[call-overload]
"""
# Drivers without types of their own: what they give is Any, unless it is annotated.
UNTYPED = """
from uuid import UUID
import asyncpg
import psycopg2
from django.db import connection, transaction
from outbox_pipelines.writer import Emitted, NewEvent, emit, emit_many
from outbox_pipelines.writer.protocols import Asyncpg, Django, Psycopg2Connection

def django() -> Emitted:
    with transaction.atomic():
        emitted: Emitted = emit(connection, "order", 1, "e", {})
        many: list[Emitted] = emit_many(connection, [NewEvent("order", 1, "e", {})])
    return many[0] if emitted.duplicate else emitted

async def pooled(pool: asyncpg.Pool) -> Emitted:
    async with pool.acquire() as acquired, acquired.transaction():
        emitted: Emitted = await emit(acquired, "order", 1, "e", {})
        many: list[Emitted] = await emit_many(acquired, [NewEvent("order", 1, "e", {})])
    return many[0] if emitted.duplicate else emitted

def old(dsn: str) -> Emitted:
    emitted: Emitted = emit(psycopg2.connect(dsn), "order", 1, "e", {})
    return emitted

def annotated(now: Django, old: Psycopg2Connection) -> UUID:
    emit(now, 5, 1, "e", {})  # type: ignore[call-overload]
    return emit(now, "order", 1, "e", {}).id or emit(old, "order", 1, "e", {}).id

async def annotated_later(later: Asyncpg) -> UUID:
    emit(later, "order", 1, "e", {}).id  # type: ignore[attr-defined]
    return (await emit(later, "order", 1, "e", {})).id

async def give(pool: asyncpg.Pool) -> UUID:
    async with pool.acquire() as acquired:
        await annotated_later(acquired)
    return annotated(connection, psycopg2.connect(""))
"""
HEAD = """
import sqlite3
import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from outbox_pipelines.writer import Emitted, NewEvent, emit, emit_many
from order_events import OrderPaid, OrderPlaced

def write(
    connection: psycopg.Connection, engine: sqlalchemy.Engine, async_engine: AsyncEngine,
    session: AsyncSession, other: sqlite3.Connection,
) -> None:
"""
WRONG = {
    'emit(engine, "order", 1, "e", {})': "call-overload",
    'emit(async_engine, "order", 1, "e", {})': "call-overload",
    'emit(other, "order", 1, "e", {})': "call-overload",
    'emit(None, "order", 1, "e", {})': "call-overload",
    'emit(open("/dev/null"), "order", 1, "e", {})': "call-overload",
    'emit(connection, 5, 1, "e", {})': "call-overload",
    'emit(connection, "order", 1, "e")': "call-overload",
    'emit(connection, "order", 1, "e", {}, {"h": 1})': "call-overload",
    'emit(connection, "order", 1, "e", {}, headers=["h"])': "call-overload",
    'emit(connection, "order", 1, "e", {}, key="k")': "call-overload",
    'emitted: Emitted = emit(session, "order", 1, "e", {})': "assignment",
    'emit(session, "order", 1, "e", {}).id': "attr-defined",
    'emit_many(connection, NewEvent("order", 1, "e", {}))': "arg-type",
    'emit_many(connection, [("order", 1, "e", {})])': "list-item",
    "emit_many(engine, [])": "call-overload",
    'NewEvent("order", 1, "e", {}).payload = 1': "misc",
    "emit(connection, OrderPaid())": "call-overload",
    'emit_many(connection, [OrderPlaced(order_id=1, currency="EUR"), OrderPaid()])': "list-item",
    "OrderPlaced(order_id=1)": "call-arg",
    'OrderPlaced(order_id="1", currency="EUR")': "arg-type",
    'OrderPlaced(order_id=1, currency="USD")': "arg-type",
    'OrderPlaced(order_id=1, currency="EUR", cupon="x")': "call-arg",
}
EVENTS = """
events:
  order.placed:
    {description: d, producer: p, owner: o, aggregate_type: order, aggregate_id: order-id, schema: {
      type: object, required: [order-id, currency], properties: {
        order-id: {type: integer}, currency: {enum: [EUR, NOK]}, coupon: {type: string}}}}
  order.paid: {description: d, producer: p, owner: o, aggregate_type: order, schema: {type: object}}
"""

HANDLERS = """
from dataclasses import dataclass
import psycopg
from sqlalchemy.ext.asyncio import AsyncSession
from outbox_pipelines.consumer import AsyncConsumer, Consumer, Event
from outbox_pipelines.consumer.testing import Verdict, handle, handle_async, make_event

@dataclass
class Placed:
    total: int

consumer = Consumer(source="s", topics=["t"], kafka={}, dsn="")
asynchronous = AsyncConsumer(source="s", topics=["t"], kafka={}, dsn="")

@consumer.on("a")
def plain(event: Event, connection: psycopg.Connection) -> None:
    print(event.payload["total"])

@consumer.on("b")
def typed(order: Placed, connection: psycopg.Connection) -> None: ...

@consumer.on("c")
def both(event: Event[Placed], connection: psycopg.Connection) -> None:
    total: int = event.payload.total
    wider: Event[object] = event

@consumer.on("d", batch=10)
def many(events: list[Event[Placed]], connection: psycopg.Connection) -> None: ...

@asynchronous.on("b")
async def waits(order: Placed, session: AsyncSession) -> None: ...

def test(connection: psycopg.Connection) -> list[Verdict]:
    return handle(consumer, make_event("a", {"total": 1}), using=connection)

async def test_async(session: AsyncSession) -> None:
    assert await handle_async(asynchronous, make_event("b"), using=session) == ["handled"]
"""
WRONG_HANDLERS = """
from outbox_pipelines.consumer import Event
from outbox_pipelines.consumer.testing import handle, make_event
from handlers import Placed, asynchronous, consumer

def f(event: Event[Placed]) -> None:
    event.payload.totla
    handle(asynchronous, make_event("a"), using=None)
    handle(consumer, {"total": 1}, using=None)
    make_event("a", totla=1)
"""

# Drivers without types of their own; in an application errors within installed packages do not count.
CONFIG = """
[mypy]
strict = true
[mypy-asyncpg.*,django.*,psycopg2.*]
ignore_missing_imports = true
"""
FILES = [
    "order_events.py",
    "right.py",
    "alone.py",
    "untyped.py",
    "wrong.py",
    "handlers.py",
    "wrong_handlers.py",
]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[str]:
    """What mypy --strict prints about the files."""
    here = tmp_path_factory.mktemp("types")
    (here / "catalog.yaml").write_text(EVENTS)
    (here / "order_events.py").write_text(classes(read_catalog(here / "catalog.yaml")))
    (here / "right.py").write_text(RIGHT)
    (here / "mypy.ini").write_text(CONFIG)
    (here / "alone.py").write_text(ALONE)
    (here / "untyped.py").write_text(UNTYPED)
    (here / "wrong.py").write_text(HEAD + "".join(f"    {call}\n" for call in WRONG))
    (here / "handlers.py").write_text(HANDLERS)
    (here / "wrong_handlers.py").write_text(WRONG_HANDLERS)
    cache = request.config.rootpath / ".mypy_cache" / "tests"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=mypy.ini", f"--cache-dir={cache}", *FILES],
        cwd=here,
        env=os.environ | {"MYPYPATH": str(request.config.rootpath)},
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_every_target_is_accepted(printed: list[str]) -> None:
    """Guards against an annotation that makes an application cast what works, and against `Event` that wants
    a parameter in strict mode."""
    assert [line for line in printed if not line.startswith(("wrong", "Found "))] == []


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_found(printed: list[str], call: str) -> None:
    """Guards against `Any` as the type of the target: an engine, or a missing `await`, would be detected only
    in production."""
    line = len(HEAD.splitlines()) + 1 + list(WRONG).index(call)
    errors = [each for each in printed if each.startswith(f"wrong.py:{line}: error:")]
    assert any(f"[{WRONG[call]}]" in error for error in errors), errors


def test_the_wrong_file_has_no_other_mistakes(printed: list[str]) -> None:
    """Guards against errors with another cause, an import for example."""
    wrong = {
        line.split(": error:")[0] for line in printed if line.startswith("wrong.py:") and ": error:" in line
    }
    first = len(HEAD.splitlines()) + 1
    assert wrong == {f"wrong.py:{line}" for line in range(first, first + len(WRONG))}


def test_mistakes_in_handlers_are_found(printed: list[str]) -> None:
    """Guards against a typed payload that is Any."""
    lines = [line for line in printed if line.startswith("wrong_handlers.py:") and ": error:" in line]
    errors = [line.rpartition(" ")[2] for line in lines]
    assert errors == ["[attr-defined]", "[arg-type]", "[arg-type]", "[call-arg]"], printed
