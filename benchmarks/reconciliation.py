"""How long a day of 2 million events is reconciled, topics and one consumer, and in how much memory.

Invariants:
- Events are written, relayed and handled as by the real parts: messages by the relay; the consumer's rows by
  one statement, in place of 2 million transactions.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.reconciled import Reconciled
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, memory
from outbox_pipelines.consumer import migrate
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings

_EVENTS = sized(2_000_000, 100_000)
_FEW = sized(200_000, 10_000)
_AT_ONCE = 1_000_000
_SLICES = 4
# Payloads stay where they are: what is read of a message is its id.
_FILL = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', (i * 7919 %% 200000)::text,
       (ARRAY['order.placed', 'order.paid', 'order.shipped'])[1 + i %% 3], jsonb_build_object('number', i)
FROM generate_series(1, %s::bigint) i"""
_HANDLE = """
INSERT INTO processed_events (event_id, source, bucket)
SELECT id, 'billing', processed_bucket(id) FROM outbox"""


def measure(servers: Settings, events: int = _EVENTS) -> list[Row]:
    """Rows of the table."""
    few, _ = _reconcile(servers, min(_FEW, events))
    whole, sliced = _reconcile(servers, events)
    what = f"reconciliation of {events:,} events: table, topic, one consumer"
    return [
        _row(what, whole, few, f"that of {int(few.events):,}"),
        _row(f"{what}, {_SLICES} slices", sliced, whole, "unsliced"),
    ]


def _row(what: str, found: Reconciled, other: Reconciled, to: str) -> Row:
    each, others = found.cpu / found.events, other.cpu / other.events
    return Row(
        what,
        (
            Figure(found.seconds, "s"),
            Figure(each * 1e6, "µs of CPU each"),
            memory([found.memory]),
            Figure(found.disk, "MB of disk"),
        ),
        (
            Ratio(each / others, to, "CPU each"),
            Ratio(found.memory / other.memory, to, "memory"),
            Ratio(found.disk / other.disk, to, "disk"),
        ),
        "< 1 GB",
    )


def _reconcile(servers: Settings, events: int) -> tuple[Reconciled, Reconciled]:
    """Return what it took as a whole, and in slices."""
    with fresh_outbox(servers) as settings, tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            for first in range(0, events, _AT_ONCE):
                connection.execute(_FILL, [min(_AT_ONCE, events - first)])
            connection.execute("VACUUM ANALYZE outbox")
        service.relay(settings, until_empty=True)
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            migrate(connection)
            connection.execute(_HANDLE)
            connection.execute("VACUUM ANALYZE processed_events")
        consumers = Path(directory) / "consumers.toml"
        consumers.write_text("[billing]\n")
        whole, sliced = (
            Reconciled(*programs.run(settings, "reconciled", _day(settings), consumers, slices))
            for slices in (1, _SLICES)
        )
    for found in (whole, sliced):
        assert found[:3] == (events, events, 0), f"not as it must be: {found}"
    return whole, sliced


def _day(settings: Settings) -> Any:
    with psycopg.connect(settings.dsn) as connection:
        ((day,),) = connection.execute("SELECT DISTINCT (created_at AT TIME ZONE 'UTC')::date FROM outbox")
    return day
