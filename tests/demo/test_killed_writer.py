"""G1 from the writer's side: kill -9 in the middle of its transactions leaves whole ones only."""

from __future__ import annotations

import sys

import pytest

from examples.airline.ledger import TORN, Ledger
from outbox_pipelines.database import connect
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import clean_environment, wait_until

WRITER = """
import time
from examples.airline.desks import Desks
from examples.airline.flights import operations
from outbox_pipelines.settings import load_settings
desks = Desks(load_settings(), operations(100_000), seed=1)
desks.start()
while desks.working():
    time.sleep(0.1)
"""
EVENTS = "SELECT count(*) FROM outbox"
MOVEMENTS = """
SELECT (SELECT coalesce(sum(movements), 0) FROM aircraft)
     + (SELECT coalesce(sum(movements), 0) FROM flights WHERE tail_number IS NULL)"""
WRITERS = """
SELECT count(*) FROM pg_stat_activity
WHERE application_name LIKE 'airline%' AND datname = current_database()"""


@pytest.mark.parametrize("events", [30, 200, 700])
def test_a_killed_writer_leaves_no_half_transaction(airline: Settings, events: int) -> None:
    with connect(airline, name="test") as connection:

        def number(query: str) -> int:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return int(row[0])

        writer: forks.Popen[bytes] = forks.Popen(
            [sys.executable, "-c", WRITER],
            env=clean_environment() | {"OUTBOX_DSN": airline.dsn, "OUTBOX_KAFKA": airline.kafka},
        )
        try:
            wait_until(lambda: number(EVENTS) >= events, what="events")
        finally:
            writer.kill()
            writer.wait()
        wait_until(lambda: number(WRITERS) == 0, what="the end of the killed writer's transactions")
        assert number(EVENTS) == number(MOVEMENTS)
        assert Ledger(connection).close().findings[TORN] == 0
