"""Writes events at a rate, or as fast as it can, from two sessions: those of 10 ms in one transaction.

As a program: ``python -m benchmarks.scale.writer DSN EVENTS_PER_SECOND SECONDS [TABLE]`` prints events and
seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import psycopg

_SESSIONS: Final = 2
_EVERY: Final = 0.01
_WRITE: Final = """
INSERT INTO {table} (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', ((%(first)s + i) %% 20000)::text, 'order.placed',
       jsonb_build_object('at', extract(epoch FROM statement_timestamp()), 'n', %(first)s + i)
FROM generate_series(1, %(events)s) i"""


def _write(dsn: str, session: int, offered: float, lasts: float, table: str, written: list[int]) -> None:
    """Write `offered` events a second for `lasts` seconds; add how many were written."""
    each = max(1, round(offered * _EVERY))
    every = each / offered
    query = _WRITE.format(table=table).encode()
    with psycopg.connect(dsn, autocommit=True) as connection:
        began = time.monotonic()
        n = 0
        while time.monotonic() < began + lasts:
            time.sleep(max(0.0, began + n * every - time.monotonic()))
            first = (n * _SESSIONS + session) * each
            connection.execute(query, {"first": first, "events": each}, prepare=True)
            n += 1
    written.append(n * each)


if __name__ == "__main__":
    dsn, offered, lasts = sys.argv[1], float(sys.argv[2]) / _SESSIONS, float(sys.argv[3])
    table = sys.argv[4] if len(sys.argv) > 4 else "outbox"
    written: list[int] = []
    began = time.monotonic()
    threads = [
        threading.Thread(target=_write, args=(dsn, session, offered, lasts, table, written))
        for session in range(_SESSIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(written), time.monotonic() - began)
