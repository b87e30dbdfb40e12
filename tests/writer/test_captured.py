"""`captured`: what code under test emits, without a database."""

from __future__ import annotations

import asyncio
import contextlib
import decimal
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any
from unittest import mock

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio

from outbox_pipelines.writer import (
    Emitted,
    NewEvent,
    OutboxError,
    PayloadTooLargeError,
    correlated,
    emit,
    emit_many,
)
from outbox_pipelines.writer.sqlalchemy import OutboxEvent
from outbox_pipelines.writer.testing import WrittenEvent, captured, events_of
from tests.schema.servers import Connection

NOBODY: Any = None
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def events() -> Iterator[list[WrittenEvent]]:
    with captured() as events:
        yield events


def test_every_member_is_recorded(events: list[WrittenEvent]) -> None:
    """Guards against members that change places, or ids of the surroundings that are missing."""
    with correlated(correlation_id="request"):
        emitted = emit(
            NOBODY, "type", 7, "event", {"a": [1]}, headers={"h": 1}, idempotency_key="k", version=3,
            causation_id="cause", traceparent=TRACE,
        )  # fmt: skip
    assert events == [
        WrittenEvent(
            emitted.id, 1, "type", "7", "event", {"a": [1]}, {"h": 1}, "k", "request", "cause", TRACE, 3
        )
    ]


def test_the_same_as_a_database_gives(connection: Connection) -> None:
    """Guards against tests that pass without a database and fail with one, because of the shape of what they
    compare."""
    batch = [
        NewEvent("order", 1, "e", {"total": decimal.Decimal("1.10"), "at": uuid.UUID(int=1), "t": (1, 2.5)}),
        NewEvent("order", "1", "e", None, {"h": None}, "k", uuid.UUID(int=2), "c", TRACE, 5),
        NewEvent("order", "1", "e", "again", idempotency_key="k"),
    ]
    with captured() as events:
        emit(connection, *batch[0][:4])
        emit_many(connection, batch)
    assert events_of(connection) == []
    emit(connection, *batch[0][:4])
    emit_many(connection, batch)
    assert [event[2:] for event in events_of(connection)] == [event[2:] for event in events]
    assert len(events) == 3


@pytest.mark.parametrize(
    ("payload", "error", "message"),
    [
        ({"a": object()}, OutboxError, "a object has no JSON form"),
        (float("nan"), OutboxError, "does not serialize"),
        ("\0", OutboxError, "NUL"),
        ("x" * 1_000_001, PayloadTooLargeError, "more than 1,000,000"),
    ],
    ids=["object", "nan", "nul", "large"],
)
def test_what_production_refuses_is_refused(
    events: list[WrittenEvent], payload: object, error: type[Exception], message: str
) -> None:
    """Guards against a payload that no database accepts, detected only in production."""
    with pytest.raises(error, match=message):
        emit(NOBODY, "order", 1, "e", payload)
    with pytest.raises(error, match=f"^event 1: .*{message}"):
        emit_many(NOBODY, [NewEvent("order", 1, "e", {}), NewEvent("order", 1, "e", payload)])
    assert events == []


def test_on_sqlite(events: list[WrittenEvent]) -> None:
    """Guards against a failing `session.add` of an event in tests on SQLite, as many applications have
    them."""
    with orm.Session(sqlalchemy.create_engine("sqlite://")) as session:
        emit(session, "order", 1, "order.placed", {})
        session.add(OutboxEvent("order", 1, "order.paid", {}))
        session.commit()
    assert [event.event_type for event in events] == ["order.placed", "order.paid"]


def test_a_payload_that_changes_later(events: list[WrittenEvent]) -> None:
    """Guards against the caller's own object in the list: the event would show later changes, not what was
    written."""
    payload = {"total": 5}
    emit(NOBODY, "order", 1, "e", payload)
    payload["total"] = 7
    assert events[0].payload == {"total": 5}


def test_ids_and_order(events: list[WrittenEvent]) -> None:
    """Guards against one id for all, or a seq that goes back; code under test uses them as keys and sorts by
    them."""
    answers = [emit(NOBODY, "order", 1, "e", {}), *emit_many(NOBODY, [NewEvent("order", 1, "e", {})] * 50)]
    assert [(event.id, event.seq) for event in events] == [(answer.id, answer.seq) for answer in answers]
    assert [answer.seq for answer in answers] == list(range(1, 52))
    assert len({answer.id for answer in answers}) == 51
    assert {(answer.id.version, answer.id.variant) for answer in answers} == {(7, uuid.RFC_4122)}


def test_a_known_key_is_a_duplicate(events: list[WrittenEvent]) -> None:
    """Guards against a second event of a key, which production does not write."""
    first = emit(NOBODY, "order", 1, "e", 1, idempotency_key="a")
    assert not first.duplicate
    assert emit(NOBODY, "order", 1, "e", 2, idempotency_key="a") == Emitted(first.id, None, duplicate=True)
    batch = [NewEvent("order", 1, "e", n, idempotency_key=key) for n, key in enumerate("abb")]
    again, second, twice = emit_many(NOBODY, batch)
    assert (again, twice) == (Emitted(first.id, None, True), Emitted(second.id, None, True))
    assert [event.payload for event in events] == [1, 1]
    assert [event.seq for event in events] == [1, 2]


@pytest.mark.parametrize(
    "target",
    [
        mock.create_autospec(sqlalchemy_asyncio.AsyncSession, instance=True),
        mock.Mock(spec=psycopg.AsyncConnection),
        mock.Mock(spec=asyncpg.Connection),
    ],
    ids=lambda target: target.__class__.__name__,
)
def test_mocks_of_asynchronous_targets_are_awaited(events: list[WrittenEvent], target: Any) -> None:
    """Guards against a forgotten `await`, with which production writes nothing, in a test that passes."""
    answer: Any = emit(target, "order", 1, "e", {})
    assert events == []
    assert isinstance(asyncio.run(answer), Emitted)
    assert len(events) == 1
    answers: Any = emit_many(target, [NewEvent("order", 1, "e", {})])
    assert len(events) == 1
    assert len(asyncio.run(answers)) == 1
    assert len(events) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "target", [None, 5, mock.Mock(), object], ids=["None", "a number", "a mock", "a class"]
)
def test_other_targets_are_as_the_block_says(target: Any, asynchronous: bool) -> None:
    """Guards against a guess from a mock that answers to every name."""
    with captured(asynchronous=asynchronous) as events:
        answer: Any = emit(target, "order", 1, "e", {})
        assert len(events) == (not asynchronous)
        if asynchronous:
            answer = asyncio.run(answer)
        assert answer == Emitted(events[0].id, 1, duplicate=False)


@pytest.mark.parametrize("target", [mock.Mock(spec=orm.Session), mock.Mock(spec=psycopg.Connection)])
def test_mocks_of_synchronous_targets_are_not_awaited(target: Any) -> None:
    """Guards against a block for asynchronous code in which a synchronous helper gets a coroutine for its
    answer."""
    with captured(asynchronous=True) as events:
        assert emit(target, "order", 1, "e", {}).seq == 1
    assert len(events) == 1
    assert target.mock_calls == []


def test_after_the_block_all_is_as_before(connection: Connection) -> None:
    """Guards against a capture that swallows the events of all later tests, especially after a failure."""
    with contextlib.suppress(ZeroDivisionError), captured() as events:
        emit(connection, "order", 1, "e", {})
        raise ZeroDivisionError
    with pytest.raises(OutboxError, match=r"cannot write through builtins\.NoneType"):
        emit(NOBODY, "order", 1, "e", {})
    emit(connection, "order", 2, "e", {})
    assert [event.aggregate_id for event in events_of(connection)] == ["2"]
    assert [event.aggregate_id for event in events] == ["1"]


def test_the_database_is_asked_all_the_same(connection: Connection) -> None:
    """Guards against a capture that also answers for what the transaction has written."""
    emit(connection, "order", 1, "e", {})
    with captured():
        assert [event.aggregate_id for event in events_of(connection)] == ["1"]


def test_the_innermost_collects() -> None:
    """Guards against events that are listed twice, or with the keys of another block."""
    with captured() as outer:
        emit(NOBODY, "order", 1, "e", {}, idempotency_key="k")
        with captured() as inner:
            assert emit(NOBODY, "order", 2, "e", {}, idempotency_key="k").duplicate is False
        assert emit(NOBODY, "order", 3, "e", {}, idempotency_key="k").duplicate is True
        emit(NOBODY, "order", 4, "e", {})
    assert [event.aggregate_id for event in outer] == ["1", "4"]
    assert [(event.aggregate_id, event.seq) for event in inner] == [("2", 1)]


def test_blocks_that_end_in_another_order() -> None:
    """Guards against fixtures of several threads in which the end of one block removes another one's."""
    first, second = captured(), captured()
    ours, theirs = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    emit(NOBODY, "order", 1, "e", {})
    second.__exit__(None, None, None)
    assert (len(ours), len(theirs)) == (0, 1)


@pytest.fixture
def hurried_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hurried_threads")
def test_threads(events: list[WrittenEvent]) -> None:
    """Guards against events lost, or one seq drawn twice, by code that emits in threads of its own."""
    together = threading.Barrier(8)

    def write(n: int) -> None:
        together.wait()
        for _ in range(1000):
            emit(NOBODY, "order", n, "e", {})

    threads = [threading.Thread(target=write, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.seq for event in events] == list(range(1, 8001))
    assert {event.aggregate_id for event in events} == set("01234567")


def test_tasks() -> None:
    """Guards against tasks that get the events of other tasks."""

    async def write() -> None:
        await asyncio.gather(*(emit(NOBODY, "order", n, "e", {}) for n in range(50)))

    with captured(asynchronous=True) as events:
        asyncio.run(write())
    assert sorted(int(event.aggregate_id) for event in events) == list(range(50))
