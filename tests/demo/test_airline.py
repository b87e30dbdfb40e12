"""The airline's transactions: business rows and events, both or neither."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pytest

from examples.airline import airline as operations_service
from examples.airline.desks import Desks
from examples.airline.flights import Flight, operations
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.settings import Settings
from tests.conftest import wait_until

NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
FLIGHT = Flight(
    id=1,
    number="UA1545",
    tail_number="N14228",
    origin="EWR",
    destination="IAH",
    scheduled_for=NOON,
    departed_at=NOON.replace(minute=5),
    arrived_at=NOON.replace(hour=15),
)
GROUNDED = replace(FLIGHT, id=2, tail_number=None, departed_at=None, arrived_at=None)

EVENTS = (
    "SELECT aggregate_type, aggregate_id, event_type, (payload->>'movement')::int FROM outbox ORDER BY seq"
)


def test_a_flights_life(airline: Settings) -> None:
    with connect(airline, name="test") as connection:
        step: Callable[[], object]
        for step in (
            lambda: operations_service.schedule(connection, [FLIGHT]),
            lambda: operations_service.depart(connection, FLIGHT),
            lambda: operations_service.arrive(connection, FLIGHT),
        ):
            with connection.transaction():
                step()
        assert connection.execute(EVENTS).fetchall() == [
            ("aircraft", "N14228", "flight.scheduled", 1),
            ("aircraft", "N14228", "flight.departed", 2),
            ("aircraft", "N14228", "flight.arrived", 3),
        ]
        row = connection.execute("SELECT scheduled_for, departed_at, arrived_at, cancelled_at FROM flights")
        assert row.fetchone() == (FLIGHT.scheduled_for, FLIGHT.departed_at, FLIGHT.arrived_at, None)


def test_without_an_aircraft_the_flight_is_the_aggregate(airline: Settings) -> None:
    with connect(airline, name="test") as connection:
        with connection.transaction():
            operations_service.schedule(connection, [GROUNDED])
        with connection.transaction():
            operations_service.cancel(connection, GROUNDED)
        assert connection.execute(EVENTS).fetchall() == [
            ("flight", "2", "flight.scheduled", 1),
            ("flight", "2", "flight.cancelled", 2),
        ]


def _roll_back() -> None:
    raise psycopg.Rollback


def test_what_is_rolled_back_leaves_neither_row_nor_event(airline: Settings) -> None:
    with connect(airline, name="test") as connection:
        with connection.transaction():
            operations_service.schedule(connection, [FLIGHT])
            _roll_back()
        assert _contents(connection) == {"flights": 0, "aircraft": 0, "outbox": 0}


def test_desks_write_the_whole_stream_in_each_aircrafts_order(airline: Settings) -> None:
    desks = Desks(airline, operations(150), seed=1)
    desks.start()
    wait_until(lambda: not desks.working(), seconds=60, what="the end of the stream")
    with connect(airline, name="test") as connection:
        assert _contents(connection)["flights"] == 150
        assert _contents(connection)["outbox"] == desks.events
        movements: Counter[tuple[str, str]] = Counter()
        for aggregate_type, aggregate_id, _, movement in connection.execute(EVENTS):
            movements[aggregate_type, aggregate_id] += 1
            assert movement == movements[aggregate_type, aggregate_id], "seq is not the order of the commits"


def test_the_seed_decides_what_is_rolled_back(airline: Settings) -> None:
    def called_off(seed: int) -> Counter[str]:
        with connect(airline, name="test") as connection:
            connection.execute("TRUNCATE flights, aircraft")
        desks = Desks(airline, operations(100), seed=seed)
        desks.start()
        wait_until(lambda: not desks.working(), seconds=60, what="the end of the stream")
        return desks.called_off

    first = called_off(1)
    assert first.total() > 0
    assert called_off(1) == first
    assert called_off(2) != first


def test_a_desk_that_fails_is_heard(airline: Settings) -> None:
    with connect(airline, name="test") as connection:
        connection.execute("DROP TABLE flights")
    desks = Desks(airline, operations(10_000), seed=1)
    desks.start()
    with pytest.raises(psycopg.errors.UndefinedTable):
        wait_until(lambda: not desks.working(), what="the failure")
    desks.stop()


def _contents(connection: Connection) -> dict[str, int]:
    counts = {}
    for table in ("flights", "aircraft", "outbox"):
        row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert row is not None
        counts[table] = row[0]
    return counts
