"""Events are written through every object that an application has, in the open transaction."""

from __future__ import annotations

import contextlib
import uuid

import psycopg
import pytest

from outbox_pipelines.writer import Emitted, NewEvent
from tests.schema.servers import Database
from tests.writer import targets
from tests.writer.targets import TARGETS, Target

ALL = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
FIND = "SELECT id, seq, payload FROM outbox WHERE aggregate_id = %s ORDER BY seq"


@pytest.fixture
def order() -> str:
    """An aggregate that no other test writes about."""
    return uuid.uuid4().hex


@ALL
def test_it_is_written_as_the_very_first_statement(kept: Database, target: Target, order: str) -> None:
    """Guards against an event that is refused, or autocommitted, if no transaction has begun yet."""
    with target(kept) as through:
        emitted = through.emit("order", order, "order.placed", {"total": 5})
        assert kept.rows(FIND, order) == []
    assert isinstance(emitted, Emitted)
    assert isinstance(emitted.id, uuid.UUID)
    assert emitted.duplicate is False
    assert kept.rows(FIND, order) == [(emitted.id, emitted.seq, {"total": 5})]


@ALL
def test_a_known_key_is_reported(kept: Database, target: Target, order: str) -> None:
    """Guards against placeholders or casts that fit the plain statement only; duplicates that raise or
    write."""
    with target(kept) as through:
        first = through.emit("order", order, "e", {"n": 1}, idempotency_key=order, headers={}, version=1)
    with target(kept) as through:
        again = through.emit("order", order, "e", {"n": 2}, idempotency_key=order)
    assert again == Emitted(first.id, None, duplicate=True)
    assert kept.rows(FIND, order) == [(first.id, first.seq, {"n": 1})]


@ALL
def test_many_are_written_in_order(kept: Database, target: Target, order: str) -> None:
    """Guards against events, or their answers, in another order; a duplicate that is written."""
    with target(kept) as through:
        [first] = through.emit_many([NewEvent("order", order, "e", 0, idempotency_key=order)])
        assert kept.rows(FIND, order) == []
        emitted = through.emit_many(
            [
                NewEvent("order", order, "e", {"n": 1}, {"h": 1}, version=1),
                NewEvent("order", order, "e", {"n": 2}, idempotency_key=f"{order} b"),
                NewEvent("order", order, "e", {"n": 3}, idempotency_key=order),
                NewEvent("order", order, "e", {"n": 4}, idempotency_key=f"{order} a"),
                NewEvent("order", order, "e", {"n": 5}, idempotency_key=f"{order} b"),
                NewEvent("order", order, "e", {"n": 6}),
            ]
        )
    assert [each.duplicate for each in emitted] == [False, False, True, False, True, False]
    assert [emitted[2], emitted[4]] == [Emitted(first.id, None, True), Emitted(emitted[1].id, None, True)]
    written = [(emitted[n - 1].id, emitted[n - 1].seq, {"n": n}) for n in (1, 2, 4, 6)]
    assert kept.rows(FIND, order) == [(first.id, first.seq, 0), *written]


@ALL
def test_it_goes_with_its_transaction(kept: Database, target: Target, order: str) -> None:
    """Guards against an event of an order that does not exist: its transaction was rolled back."""
    with contextlib.suppress(ZeroDivisionError), target(kept) as through:
        through.emit("order", order, "e", {})
        through.emit("order", order, "e", {}, idempotency_key=order)
        through.emit_many([NewEvent("order", order, "e", {})] * 2)
        raise ZeroDivisionError
    assert kept.rows(FIND, order) == []


def test_it_goes_with_its_savepoint(kept: Database, order: str) -> None:
    """Guards against events that outlive a part of the transaction that was undone."""
    with targets.psycopg_connection(kept) as through:
        kept_event = through.emit("order", order, "e", {"n": 1})
        with through.target.transaction(force_rollback=True):
            through.emit("order", order, "e", {"n": 2})
    with targets.session(kept) as through:
        with through.target.begin_nested() as savepoint:
            through.emit("order", order, "e", {"n": 3})
            savepoint.rollback()
        late_event = through.emit("order", order, "e", {"n": 4})
    assert [row[0] for row in kept.rows(FIND, order)] == [kept_event.id, late_event.id]


def test_the_callers_own_statements_are_untouched(kept: Database, order: str) -> None:
    """Guards against a cursor that has lost its result, or its row factory, because an event was written."""
    with targets.dict_cursor(kept) as through:
        cursor = through.target
        cursor.execute("SELECT n FROM generate_series(1, 3) n")
        assert cursor.fetchone() == {"n": 1}
        through.emit("order", order, "e", {})
        assert cursor.fetchall() == [{"n": 2}, {"n": 3}]


def test_an_aborted_transaction_says_so(kept: Database, order: str) -> None:
    """Guards against a helper that hides the driver's own error, or opens another transaction instead."""
    with targets.psycopg_connection(kept) as through:
        with pytest.raises(psycopg.errors.DivisionByZero):
            through.target.execute("SELECT 1/0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            through.emit("order", order, "e", {})
        through.target.rollback()
    assert kept.rows(FIND, order) == []
