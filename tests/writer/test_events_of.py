"""`events_of`: what the open transaction has written."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import pytest

from outbox_pipelines.writer import AutocommitError, NewEvent, OutboxError, emit, emit_many
from outbox_pipelines.writer.testing import events_of
from tests.schema.servers import Connection, Database
from tests.writer.targets import AUTOCOMMIT, TARGETS, Target

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Undone(Exception):  # noqa: N818
    """Rolls a test's events back."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_target(shared: Database, target: Target) -> None:
    """Guards against a target that can be written through but not queried, or whose codecs interfere."""
    full = NewEvent("order", "2", "e", None, None, "k", "request", "cause", TRACE, None)
    with contextlib.suppress(Undone), target(shared) as through:
        assert through.events_of() == []
        first = through.emit("order", "1", "e", {"a": [1.5]}, headers={"h": 1}, version=3)
        [second] = through.emit_many([full])
        assert through.events_of() == [
            (
                first.id,
                first.seq,
                "order",
                "1",
                "e",
                {"a": [1.5]},
                {"h": 1},
                None,
                None,
                None,
                None,
                3,
                None,
                False,
            ),
            (second.id, second.seq, *full),
        ]
        raise Undone


def test_others_are_not_seen(kept: Database) -> None:
    """Guards against events that another test, or the data of a developer's database, has committed."""
    with kept.connect(autocommit=False) as other, kept.connect(autocommit=False) as ours:
        emit(other, "order", "theirs", "e", {})
        emit(ours, "order", "ours", "e", {})
        other.commit()
        assert [event.aggregate_id for event in events_of(ours)] == ["ours"]
        ours.commit()
        assert events_of(ours) == []


def _roll_back() -> None:
    raise psycopg.Rollback


def test_savepoints(connection: Connection) -> None:
    """Guards against a wrong answer for code with savepoints: ids of subtransactions are not in the rows."""
    with connection.transaction():
        emit(connection, "order", "kept", "e", {})
    with connection.transaction():
        emit(connection, "order", "undone", "e", {})
        _roll_back()
    assert [event.aggregate_id for event in events_of(connection)] == ["kept"]


def test_it_writes_nothing(connection: Connection) -> None:
    """Guards against a query that draws a transaction id, or aborts the transaction."""
    assert events_of(connection) == []
    assert connection.execute("SELECT pg_current_xact_id_if_assigned()").fetchall() == [(None,)]


@pytest.mark.parametrize("target", AUTOCOMMIT)
def test_without_a_transaction(shared: Database, target: Target) -> None:
    """Guards against an empty answer for code that has written events, each in a transaction of its own that
    is over."""
    with target(shared) as through, pytest.raises(AutocommitError, match="no transaction is open"):
        through.events_of()


def test_other_kinds() -> None:
    """Guards against an AttributeError from library code."""
    nobody: Any = object()
    with pytest.raises(OutboxError, match="cannot write through"):
        events_of(nobody)


def test_order(connection: Connection) -> None:
    """Guards against rows in the order in which the plan happens to return them."""
    emit_many(connection, [NewEvent("order", n % 7, "e", n) for n in range(500)])
    assert [event.payload for event in events_of(connection)] == list(range(500))
