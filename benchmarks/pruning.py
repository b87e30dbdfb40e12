"""What forgetting costs a consumer: a day of processed events goes, beside a DELETE of the same rows.

Invariants:
- Both days have as many rows, made in the same way, and lie 20 days back.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

import psycopg

from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row
from outbox_pipelines.consumer import migrate, prune
from outbox_pipelines.settings import Settings

_ROWS: Final = sized(10_000_000, 200_000)
_KEEP: Final = timedelta(days=14)
# Ids of version 7, spread over one day, with random ends, in the order of their times as they come.
_FILL: Final = """
INSERT INTO processed_events (event_id, source, bucket, processed_at)
SELECT id, 'billing', processed_bucket(id), now() - interval '20 days'
FROM (SELECT (lpad(to_hex((extract(epoch FROM current_date - 20) * 1000)::bigint
        + n::bigint * 86400000 / %(rows)s), 12, '0')
    || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid AS id
    FROM generate_series(0, %(rows)s - 1) n) AS ids"""
_DELETE: Final = "DELETE FROM processed_events WHERE processed_at < now() - %(keep)s"
_SIZE: Final = """
SELECT sum(pg_total_relation_size(inhrelid))::float8 FROM pg_inherits
WHERE inhparent = 'processed_events'::regclass"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows, left = {}, {}
    for name in ("prune", "DELETE"):
        with fresh_outbox(servers) as settings, psycopg.connect(settings.dsn, autocommit=True) as connection:
            migrate(connection)
            connection.execute(_FILL, {"rows": _ROWS})
            connection.execute("CHECKPOINT")
            started = time.monotonic()
            if name == "prune":
                assert len(prune(connection, _KEEP).emptied) == 1
            else:
                assert connection.execute(_DELETE, {"keep": _KEEP}).rowcount == _ROWS
            rows[name] = time.monotonic() - started
            left[name] = connection.execute(_SIZE).fetchone()
    return [
        Row(
            f"consumer: {_ROWS:,} processed events forgotten, {name}",
            (Figure(seconds, "s"), Figure((left[name] or (0,))[0] / 1e6, "MB left")),
            (Ratio(seconds / rows["DELETE"], "DELETE"),) if name == "prune" else (),
        )
        for name, seconds in rows.items()
    ]
