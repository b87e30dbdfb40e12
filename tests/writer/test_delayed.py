"""Delayed events: `emit(…, deliver_after=…)` and `cancel`, through every target and in tests."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import orm

from outbox_pipelines.writer import NewEvent, OutboxError, cancel, emit, emit_many
from outbox_pipelines.writer.sqlalchemy import OutboxEvent
from outbox_pipelines.writer.testing import captured, events_of
from tests.schema.servers import Connection, Database
from tests.writer import targets
from tests.writer.targets import TARGETS, Target

HOUR = timedelta(hours=1)
TOKYO = timezone(timedelta(hours=9))
NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=250) + timedelta(days=2)


class Undone(Exception):  # noqa: N818
    """Rolls a test's events back."""


@dataclass
class OrderExpired:
    __event_type__ = "order.expired"
    __aggregate_type__ = "order"
    __aggregate_id__ = "order_id"
    order_id: str


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_every_target(shared: Database, target: Target) -> None:
    """Guards against a driver that sends a time otherwise, or for which an event that waits is an error."""
    with contextlib.suppress(Undone), target(shared) as through:
        at_noon = through.emit("order", "1", "e", {"a": 1}, deliver_after=NOON, later_events_wait=True)
        assert at_noon[1:] == (None, False)
        behind = through.emit("order", "1", "behind", {}, headers={"h": 1})
        assert behind[1:] == (None, False)
        [other, listed] = through.emit_many(
            [
                NewEvent("order", "2", "e", {}, idempotency_key="k", deliver_after=HOUR),
                NewEvent("order", "1", "listed", {}),
            ]
        )
        [last, free] = through.emit_many([NewEvent("order", n, "last", {}) for n in "12"])
        assert [each.seq is None for each in (other, listed, last, free)] == [True, True, True, False]
        found = through.events_of()
        assert [(each.id, each.deliver_after, each.later_events_wait) for each in found] == [
            (at_noon.id, NOON, True),
            (behind.id, None, False),
            (other.id, found[2].deliver_after, False),
            (listed.id, None, False),
            (last.id, None, False),
            (free.id, None, False),
        ]
        assert found[2].deliver_after is not None
        assert abs(found[2].deliver_after - datetime.now(UTC) - HOUR) < timedelta(minutes=5)
        assert through.cancel(other.id) is True
        assert through.cancel(other.id) is False
        assert through.cancel(free.id) is False
        raise Undone


def test_a_session_adds_delayed_events(shared: Database) -> None:
    """Guards against an object that is written at once, or flushed forever because it has no seq."""
    with orm.Session(targets.engine(shared)) as session, contextlib.suppress(Undone), session.begin():
        event = OutboxEvent("order", "1", "e", {}, deliver_after=HOUR, later_events_wait=True)
        behind = OutboxEvent("order", "1", "behind", {})
        session.add_all([event, behind])
        session.flush()
        assert (event.seq, behind.seq) == (None, None)
        assert cancel(session, event.id) is True
        assert [each.event_type for each in events_of(session)] == ["behind"]
        raise Undone


def test_typed_events_and_another_time_zone(connection: Connection) -> None:
    """Guards against a time that the session reads in its own zone."""
    connection.execute("SET LOCAL TimeZone = 'Asia/Tokyo'; SET LOCAL DateStyle = 'German'")
    emit(connection, OrderExpired("7"), deliver_after=NOON.astimezone())
    [event] = events_of(connection)
    assert (event.event_type, event.aggregate_id, event.deliver_after) == ("order.expired", "7", NOON)
    emit(connection, OrderExpired("7"), deliver_after=-HOUR)
    assert events_of(connection)[1].deliver_after is None


def test_a_class_delays_its_events(connection: Connection) -> None:
    """Guards against a delay of a type that one of the calls forgets, or that none can replace."""

    class OrderUnpaid(OrderExpired):
        __event_type__ = "order.unpaid"
        __deliver_after__ = 2 * HOUR

    emit(connection, OrderUnpaid("7"))
    emit_many(connection, [OrderUnpaid("7"), OrderExpired("7")])
    emit(connection, OrderUnpaid("7"), deliver_after=NOON)
    emit(connection, OrderUnpaid("7"), deliver_after=timedelta())
    due = [event.deliver_after for event in events_of(connection)]
    assert due[0] is not None
    assert due[0] - datetime.now(UTC) > HOUR
    assert due[1:] == [due[0], None, NOON, None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deliver_after": datetime(2999, 1, 1)}, "no time zone"),
        ({"deliver_after": 60}, "give a datetime with a zone, or a timedelta"),
        ({"deliver_after": timedelta(days=4000)}, "at most ten years"),
        ({"later_events_wait": True}, "not delayed: give deliver_after too"),
        ({"deliver_after": HOUR, "later_events_wait": "no"}, "give True"),
    ],
)
def test_what_is_refused_before_anything_is_sent(options: dict[str, Any], says: str) -> None:
    """Guards against a mistake that aborts the transaction, or that means something else."""
    nothing: Any = None
    with captured() as events, pytest.raises(OutboxError, match=says):
        emit(nothing, "order", 1, "e", {}, **options)
    assert events == []


@pytest.mark.parametrize("id", ["nope", None, 7])
def test_what_is_no_id_is_refused_before_anything_is_sent(connection: Connection, id: Any) -> None:
    """Guards against a mistake that aborts the transaction."""
    with pytest.raises(OutboxError, match="give the id that emit has returned"):
        cancel(connection, id)
    assert connection.execute("SELECT 1").fetchall() == [(1,)]


def test_captured_events_are_those_of_a_database(connection: Connection) -> None:
    """Guards against a test of an application that passes with other events than production writes."""

    def application(target: Any) -> list[bool]:
        first = emit(target, "order", 1, "e", {}, deliver_after=HOUR)
        later = NewEvent("order", 1, "f", {}, deliver_after=NOON.astimezone(TOKYO))
        [second, _] = emit_many(target, [later] * 2)
        past = emit(target, "order", 2, "p", {}, deliver_after=timedelta.min)
        emit(target, "order", 2, "p", {}, deliver_after=timedelta(), later_events_wait=True)
        waited_for = emit(target, "order", 2, "w", {}, deliver_after=HOUR, later_events_wait=True)
        behind, other = (emit(target, "order", n, "b", {}) for n in (2, 1))
        canceled = [
            cancel(target, each)
            for each in (first.id, second.id, second.id, uuid.uuid4(), past.id, behind.id, waited_for.id)
        ]
        free = emit(target, "order", 2, "free", {})
        return [
            *canceled,
            *(each.seq is None for each in (first, second, past, waited_for, behind, other, free)),
        ]

    with captured() as events:
        answers = application(None)
    assert answers[:7] == [True, True, False, False, False, True, True]
    assert answers[7:] == [True, True, False, True, True, False, False]
    assert application(connection) == answers
    ours, theirs = events, events_of(connection)
    assert [each[2:-2] for each in ours] == [each[2:-2] for each in theirs]
    assert [each.later_events_wait for each in ours] == [each.later_events_wait for each in theirs]
    assert [each.deliver_after is None for each in ours] == [each.deliver_after is None for each in theirs]
    due = ours[0].deliver_after, theirs[0].deliver_after
    assert [each and each.isoformat() for each in due] == [NOON.isoformat()] * 2
