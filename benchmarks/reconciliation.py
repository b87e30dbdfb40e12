"""How long a day of 10 million events is reconciled, topics and one consumer, and in how much memory.

Invariants:
- Events are written, relayed and handled as by the real parts: messages by the relay; the consumer's rows by
  one statement, in place of 10 million transactions.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, memory
from outbox_pipelines.consumer import migrate
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings

_EVENTS = sized(10_000_000, 100_000)
_FEW = sized(1_000_000, 10_000)
_AT_ONCE = 1_000_000
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
    few, many = _reconcile(servers, min(_FEW, events)), _reconcile(servers, events)
    return [
        Row(
            f"reconciliation of {events:,} events: table, topic, one consumer",
            (Figure(many[3], "s"), memory([many[4]]), Figure(many[5], "MB of disk")),
            (
                Ratio(many[4] / few[4], f"that of {int(few[0]):,}", "memory"),
                Ratio(many[3] / few[3], f"that of {int(few[0]):,}", "time"),
            ),
            "< 1 GB",
        )
    ]


def _reconcile(servers: Settings, events: int) -> list[float]:
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
        found = programs.run(settings, "reconciled", _day(settings), consumers)
    assert found[:3] == [events, events, 0], f"not as it must be: {found}"
    return found


def _day(settings: Settings) -> Any:
    with psycopg.connect(settings.dsn) as connection:
        ((day,),) = connection.execute("SELECT DISTINCT (created_at AT TIME ZONE 'UTC')::date FROM outbox")
    return day
