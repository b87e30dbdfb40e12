"""The archive of docs/queries.md: four days of flights, written by the demo's airline.

`python -m tests.days.archive.flights DIRECTORY` makes it, with a PostgreSQL of its own.

Invariants:
- The same events in the same order each time; only their ids differ.
- Each event is of the time that it tells of, as an owner's backfill makes it.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import date, timedelta
from itertools import takewhile
from pathlib import Path

import psycopg

from examples.airline import airline
from examples.airline.flights import ARRIVED, CANCELLED, DEPARTED, SCHEDULED, Operation, operations
from outbox_pipelines.database import schema
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import Settings, load_settings

FIRST = date(2013, 1, 1)
DAYS = [FIRST + timedelta(n) for n in range(4)]
# Those of the four days, in New York; the last evening there is the fifth day in UTC.
_FLIGHTS = 842 + 943 + 914 + 915

# As if the years from then on had partitions already: five thousand empty ones are not needed here.
_MAKE_DAYS = """
INSERT INTO outbox_days (day)
SELECT day::date FROM generate_series(%(after)s::date, now() - interval '3 days', '1 day') day;
SELECT outbox_ensure_partitions(14, %(first)s);
DELETE FROM outbox_days
WHERE day >= %(after)s AND to_regclass('outbox_' || to_char(day, 'YYYYMMDD')) IS NULL"""
_OF_ITS_TIME = "ALTER TABLE outbox ALTER created_at SET DEFAULT current_setting('flights.now')::timestamptz"
_AS_ALWAYS = "ALTER TABLE outbox ALTER created_at SET DEFAULT now()"
_PUBLISHED = "UPDATE outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL"


def build(settings: Settings) -> None:
    """Writes the flights into a migrated database, and archives their days."""
    with psycopg.connect(settings.require_dsn()) as connection:
        cursor = psycopg.ClientCursor(connection)
        cursor.execute(_MAKE_DAYS, {"first": FIRST, "after": DAYS[-1] + timedelta(1)})
        cursor.execute(airline.TABLES)
        cursor.execute(_OF_ITS_TIME)
        cursor.execute("SET LOCAL outbox.backfill = on")
        for operation in takewhile(lambda each: each.at.date() <= DAYS[-1], operations(_FLIGHTS)):
            cursor.execute("SELECT set_config('flights.now', %s, true)", [operation.at.isoformat()])
            _perform(connection, operation)
        cursor.execute(_AS_ALWAYS)
    with psycopg.connect(settings.require_dsn()) as connection:
        connection.execute(_PUBLISHED)
    for day in DAYS:
        days.archive(settings, day)


def _perform(connection: psycopg.Connection, operation: Operation) -> None:
    if operation.event_type == SCHEDULED:
        airline.schedule(connection, operation.flights)
        return
    perform = {DEPARTED: airline.depart, ARRIVED: airline.arrive, CANCELLED: airline.cancel}
    perform[operation.event_type](connection, operation.flights[0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, postgres.Postgres(Path(folder)) as server:
        given = load_settings(dsn=server.dsn, archive=sys.argv[1])
        schema.migrate(given)
        build(given)
