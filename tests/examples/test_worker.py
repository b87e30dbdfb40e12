"""The worker of `examples/`."""

from __future__ import annotations

import subprocess

from tests.examples.services import EXAMPLES, environment, events, python
from tests.schema.servers import Database


def work(database: Database, *kilos: str) -> str:
    command = python("worker.py", *kilos)
    return subprocess.run(
        command, cwd=EXAMPLES, env=environment(database), check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def test_orders_are_shipped_or_refused(database: Database) -> None:
    """Guards against an example whose refused order has sent its parcels all the same, and that people
    copy."""
    assert work(database, "12", "40", "7") == "order 2 is too heavy\n"
    assert [(event.aggregate_id, event.event_type, event.payload) for event in events(database)] == [
        ("1-0", "parcel.sent", {"kilos": 10}),
        ("1-10", "parcel.sent", {"kilos": 2}),
        ("1", "order.shipped", {"parcels": 2}),
        ("2", "order.refused", {}),
        ("3-0", "parcel.sent", {"kilos": 7}),
        ("3", "order.shipped", {"parcels": 1}),
    ]
    [worker] = {event.correlation_id for event in events(database)}
    assert worker is not None
    assert database.rows("SELECT state FROM worker_orders ORDER BY id") == [
        ("shipped",),
        ("refused",),
        ("shipped",),
    ]


def test_a_second_run(database: Database) -> None:
    """Guards against orders shipped again, and a refusal sent twice after a crash between transactions."""
    work(database, "12", "40")
    before = events(database)
    database.rows("UPDATE worker_orders SET state = 'paid' WHERE state = 'refused'")
    work(database)
    assert events(database) == before
    assert database.value("SELECT count(*) FROM worker_orders WHERE state = 'refused'") == 1
