"""Many events, quickly: by SQL, in transactions of 1,000, from two sessions at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import psycopg

from outbox_pipelines.settings import Settings

_SESSIONS: Final = 2
_TRANSACTION: Final = 1_000
# Between two checkpoints: bounds the WAL on disk.
_PORTION: Final = 1_000_000
# The events of `benchmarks.servers.fill`.
_FILL: Final = """
DO $$ BEGIN
FOR begin_at IN {first}..{last} BY {transaction} LOOP
    INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'order', (i % 20000)::text, 'order.placed',
           jsonb_build_object('number', i, 'customer', md5(i::text), 'state', 'placed',
                              'note', md5((i * 7)::text) || md5((i * 11)::text), 'total', i % 1000)
    FROM generate_series(begin_at, least(begin_at + {transaction} - 1, {last})) i;
    COMMIT;
END LOOP; END $$"""


def fill(settings: Settings, events: int) -> None:
    """Commit events of about 200 bytes for 20,000 aggregates."""
    with ThreadPoolExecutor(_SESSIONS) as pool:
        for start in range(0, events, _PORTION):
            stop = min(start + _PORTION, events)
            middle = (start + stop) // 2
            list(pool.map(lambda ends: _fill(settings, *ends), ((start, middle), (middle, stop))))
            with psycopg.connect(settings.dsn, autocommit=True) as connection:
                connection.execute("CHECKPOINT")
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE outbox")
        connection.execute("CHECKPOINT")


def _fill(settings: Settings, start: int, stop: int) -> None:
    if start == stop:
        return
    statement = _FILL.format(first=start + 1, last=stop, transaction=_TRANSACTION)
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        # The rows are what is measured, and not how they come in.
        connection.execute("SET synchronous_commit = off")
        connection.execute(statement.encode())
