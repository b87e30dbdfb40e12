"""What an aggregate costs the others whose first event Kafka refuses, with many behind it."""

from __future__ import annotations

from typing import Final

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox, rewind
from benchmarks.table import Ratio, Row, paired, rate
from outbox_pipelines.settings import Settings

_OTHERS: Final = sized(400_000, 40_000)
_BEHIND: Final = sized(200_000, 20_000)
_ROUNDS: Final = sized(3, 2)
# One event in three is of the hot aggregate; its first comes before all others.
_FIRST: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', 'hot', 'order.placed', to_jsonb(string_agg(md5(i::text), '')) FROM generate_series(1, %s) i"""
_FILL: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', CASE WHEN i %% 3 = 0 THEN 'hot' ELSE (i %% 20000)::text END, 'order.placed',
       jsonb_build_object('number', i, 'customer', md5(i::text), 'state', 'placed',
                          'note', md5((i * 7)::text) || md5((i * 11)::text), 'total', i %% 1000)
FROM generate_series(1, %s) i"""
_LIMIT: Final = 100_000
# Of 32 bytes each, which hardly compress.
_TOO_LARGE: Final = 2 * _LIMIT // 32


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    limit = {"max.message.bytes": str(_LIMIT)}
    with fresh_outbox(servers, **limit) as healthy, fresh_outbox(servers, **limit) as poisoned:
        _write(healthy, 1)
        _write(poisoned, _TOO_LARGE)
        rates: dict[str, list[float]] = {"healthy": [], "poisoned": []}
        for _ in range(_ROUNDS):
            rates["healthy"].append(_rate(healthy, 1 + _OTHERS + _BEHIND))
            rates["poisoned"].append(_rate(poisoned, _OTHERS))
    ratio = Ratio(paired(rates["poisoned"], rates["healthy"]), "healthy")
    return [
        Row(f"{_OTHERS:,} events beside a healthy aggregate's {_BEHIND:,}", (rate(rates["healthy"]),)),
        Row(
            f"{_OTHERS:,} events beside {_BEHIND:,} that are parked behind a rejected one",
            (rate(rates["poisoned"]),),
            (ratio,),
            "≥ 0.80 ×",
        ),
    ]


def _write(settings: Settings, hashes: int) -> None:
    with psycopg.connect(settings.dsn) as connection:
        connection.execute(_FIRST, [hashes])
        connection.execute(_FILL, [_OTHERS + _BEHIND])
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE outbox")
        connection.execute("CHECKPOINT")


def _rate(settings: Settings, expected: int) -> float:
    """Of the others, in events a second."""
    rewind(settings)
    with psycopg.connect(settings.dsn) as connection:
        connection.execute("TRUNCATE outbox_parked")
    drain = programs.drain(settings)
    assert drain.events == expected, drain
    return _OTHERS / drain.seconds
