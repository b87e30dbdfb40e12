"""The airports' board: another service, which knows the airline by its events alone.

The example to read before you write a consumer. The handler changes the board's own tables; that it did is
committed with them, so each event counts once, however often it comes and whenever this process dies. It
takes a few events at a time, for fewer commits.

Invariants:
- It reads nothing of the airline's tables: whether the board equals them is for others to find out.

As a program: ``python -m examples.airline.board`` works until it is ended.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from psycopg import Connection

from examples.airline.flights import DEPARTED
from examples.airline.place import kafka_client, topics
from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.database import connect
from outbox_pipelines.settings import Settings, load_settings

SOURCE: Final = "board"
_AT_ONCE: Final = 20


def consumer(settings: Settings, **kafka: Any) -> Consumer:
    """The service, to be `run`; `kafka` are settings of its client."""
    board = Consumer(
        source=SOURCE,
        topics=topics(settings),
        kafka=kafka_client(
            settings,
            **{
                # The next process takes the place of a killed one at once.
                "group.instance.id": SOURCE,
                "group.id": f"{topics(settings)[0]}-{SOURCE}",
                **kafka,
            },
        ),
        connect=lambda: connect(settings, name="outbox demo: board"),
        # An event that a killed process was handling is retried after so many seconds.
        retry_seconds=0.5,
    )
    board.on(DEPARTED, batch=_AT_ONCE)(departed)
    return board


def departed(events: list[Event], connection: Connection[Any]) -> None:
    """Counts flights and delays for their carriers, and shows aircraft where they were seen last."""
    flights = [event.payload for event in events]
    counted = [{"carrier": flight["number"][:2], "late": flight["late"]} for flight in flights]
    seen = [
        {
            "tail_number": event.aggregate_id,
            "airport": flight["origin"],
            "at": datetime.fromisoformat(flight["at"]),
            "flight": flight["flight"],
        }
        for event, flight in zip(events, flights, strict=True)
        if event.aggregate_type == "aircraft"
    ]
    with connection.cursor() as cursor:
        cursor.executemany(_COUNT, counted)
        cursor.executemany(_SEE, seen)


TABLES: Final = """
CREATE TABLE board_carriers (
    carrier       text PRIMARY KEY,
    departures    int NOT NULL,
    minutes_late  int NOT NULL
);
CREATE TABLE board_aircraft (
    tail_number   text PRIMARY KEY,
    airport       text NOT NULL,
    seen_at       timestamptz NOT NULL,
    flight        int NOT NULL
)"""
_COUNT: Final = """
INSERT INTO board_carriers (carrier, departures, minutes_late) VALUES (%(carrier)s, 1, %(late)s)
ON CONFLICT (carrier) DO UPDATE
SET departures = board_carriers.departures + 1,
    minutes_late = board_carriers.minutes_late + excluded.minutes_late"""
# Three desks write of one aircraft: the order of their commits is not always that of the clock.
_SEE: Final = """
INSERT INTO board_aircraft (tail_number, airport, seen_at, flight)
VALUES (%(tail_number)s, %(airport)s, %(at)s, %(flight)s)
ON CONFLICT (tail_number) DO UPDATE
SET airport = excluded.airport, seen_at = excluded.seen_at, flight = excluded.flight
WHERE (excluded.seen_at, excluded.flight) > (board_aircraft.seen_at, board_aircraft.flight)"""

if __name__ == "__main__":
    consumer(load_settings()).run()
