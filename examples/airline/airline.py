"""The airline's operations service: its tables, and the transactions that write them together with events.

The example to read before you write to an outbox yourself. A transaction takes three steps: take the
aggregate's own row, write the business rows, `emit`. Then the caller commits, or does not: all of it counts,
or nothing.

Invariants:
- The aggregate's row is changed first. That locks it until the transaction ends, so that the order of an
  aggregate's events (`seq`) is the order in which their transactions commit.
- The aggregate is the aircraft, or the flight where it has none. Its row counts its events, and the payload
  carries that number as ``movement``: a consumer can verify that none is missing or late.
- Nothing here commits, rolls back, or knows of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, LiteralString

from psycopg import Connection

from examples.airline.flights import ARRIVED, CANCELLED, DEPARTED, SCHEDULED, Flight
from outbox_pipelines.writer import emit


def schedule(connection: Connection[Any], flights: Sequence[Flight]) -> None:
    """Plans an aircraft's day at an airport: a row and an event for each of its flights."""
    for flight in flights:
        movement = _take_aircraft(connection, flight)
        connection.execute(
            _SCHEDULE,
            {
                "id": flight.id,
                "number": flight.number,
                "tail_number": flight.tail_number,
                "origin": flight.origin,
                "destination": flight.destination,
                "at": flight.scheduled_for,
            },
        )
        _tell(connection, flight, SCHEDULED, flight.scheduled_for, movement or 1)


def depart(connection: Connection[Any], flight: Flight) -> None:
    """The flight has left; its event says how many minutes late."""
    assert flight.departed_at is not None, f"flight {flight.id} has not left"
    late = (flight.departed_at - flight.scheduled_for) // timedelta(minutes=1)
    _follow_up(connection, flight, DEPARTED, _DEPART, flight.departed_at, late=late)


def arrive(connection: Connection[Any], flight: Flight) -> None:
    """The flight has come to its destination."""
    _follow_up(connection, flight, ARRIVED, _ARRIVE, flight.arrived_at)


def cancel(connection: Connection[Any], flight: Flight) -> None:
    """The flight will not take place."""
    _follow_up(connection, flight, CANCELLED, _CANCEL, flight.scheduled_for)


def _follow_up(
    connection: Connection[Any],
    flight: Flight,
    event_type: str,
    statement: LiteralString,
    at: datetime | None,
    **more: int,
) -> None:
    """What happens to a flight after it was planned."""
    assert at is not None, f"flight {flight.id} knows no time for {event_type}"
    movement = _take_aircraft(connection, flight)
    row = connection.execute(statement, {"at": at, "id": flight.id}).fetchone()
    assert row is not None, f"flight {flight.id} was never planned"
    _tell(connection, flight, event_type, at, movement or row[0], **more)


def _take_aircraft(connection: Connection[Any], flight: Flight) -> int | None:
    """Locks the aircraft until the transaction ends; the number of its movement. None without an aircraft:
    then the flight's own row takes its place."""
    if flight.tail_number is None:
        return None
    row = connection.execute(_TAKE_AIRCRAFT, {"tail_number": flight.tail_number}).fetchone()
    assert row is not None
    return int(row[0])


def _tell(
    connection: Connection[Any], flight: Flight, event_type: str, at: datetime, movement: int, **more: int
) -> None:
    aggregate, name = ("aircraft", flight.tail_number) if flight.tail_number else ("flight", flight.id)
    body = {
        "movement": movement,
        "flight": flight.id,
        "number": flight.number,
        "origin": flight.origin,
        "destination": flight.destination,
        "at": at.isoformat(),
        **more,
    }
    emit(connection, aggregate, name, event_type, body)


TABLES: Final = """
CREATE TABLE aircraft (
    tail_number   text PRIMARY KEY,
    movements     int NOT NULL
);
CREATE TABLE flights (
    id            int PRIMARY KEY,
    number        text NOT NULL,
    tail_number   text REFERENCES aircraft,
    origin        text NOT NULL,
    destination   text NOT NULL,
    scheduled_for timestamptz NOT NULL,
    departed_at   timestamptz,
    arrived_at    timestamptz,
    cancelled_at  timestamptz,
    movements     int NOT NULL
)"""
# Known or new: either way the row is locked from here on.
_TAKE_AIRCRAFT: Final = """
INSERT INTO aircraft (tail_number, movements) VALUES (%(tail_number)s, 1)
ON CONFLICT (tail_number) DO UPDATE SET movements = aircraft.movements + 1
RETURNING movements"""
_SCHEDULE: Final = """
INSERT INTO flights (id, number, tail_number, origin, destination, scheduled_for, movements)
VALUES (%(id)s, %(number)s, %(tail_number)s, %(origin)s, %(destination)s, %(at)s, 1)"""
_DEPART: Final = """
UPDATE flights SET departed_at = %(at)s, movements = movements + 1 WHERE id = %(id)s RETURNING movements"""
_ARRIVE: Final = """
UPDATE flights SET arrived_at = %(at)s, movements = movements + 1 WHERE id = %(id)s RETURNING movements"""
_CANCEL: Final = """
UPDATE flights SET cancelled_at = %(at)s, movements = movements + 1 WHERE id = %(id)s RETURNING movements"""
