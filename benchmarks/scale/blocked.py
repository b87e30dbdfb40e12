"""Blocked aggregates, ten times as many each: the rate of all others, and what a round of retries costs."""

from __future__ import annotations

from statistics import median
from typing import Final

import psycopg

from benchmarks import latency, programs
from benchmarks.scale import state
from benchmarks.scale.filling import fill
from benchmarks.scale.growth import FLAT, Figure, megabytes, milliseconds, number, p99, rate, seconds, table
from benchmarks.scale.sizes import Sizes
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.settings import Settings

_ROUNDS: Final = 3
_LIMIT: Final = 100_000
# Of 32 bytes each, which hardly compress: a little more than the topic accepts.
_HASHES: Final = _LIMIT * 11 // 10 // 32
_REFUSED: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', 'blocked-' || a, 'order.placed', (
    SELECT to_jsonb(string_agg(md5((a * %(hashes)s + i)::text), '')) FROM generate_series(1, %(hashes)s) i)
FROM generate_series(1, %(aggregates)s) a"""
_ATTEMPTS: Final = "SELECT coalesce(sum(attempts), 0) FROM outbox_parked"
_BACK: Final = "UPDATE outbox_shards SET done = %s, target = NULL, last_seq = NULL"
_LAST: Final = "SELECT max(seq) FROM outbox"
_DUE: Final = "UPDATE outbox_parked SET attempts = 0, next_attempt_at = NULL"
_NONE: Final = "0"
_FIGURES: Final = (
    Figure("drain of the others", rate, FLAT),
    Figure("peak memory of the relay", megabytes, FLAT),
    Figure("the others at 1,000/s, p50", milliseconds, FLAT),
    Figure("the others at 1,000/s, p99", milliseconds),
    Figure("attempts in that time", number),
    Figure("a round of retries", seconds, "≤ 10 ×"),
    Figure("a round, CPU of the relay", seconds, "≤ 10 ×"),
    Figure("a round, CPU of PostgreSQL", seconds, "≤ 10 ×"),
)


def measure(servers: Settings, sizes: Sizes) -> list[Row]:
    """Rows of the table."""
    found = {f"{count:,}": _at(servers, sizes, count) for count in (0, *sizes.blocked)}
    return table("{} aggregates blocked", _FIGURES, found, base=_NONE)


def _at(servers: Settings, sizes: Sizes, count: int) -> dict[str, float]:
    # No attempt is the last, and none is made twice in a round.
    patient = servers.model_copy(update={"max_attempts": 1_000, "retry_seconds": 60.0})
    with fresh_outbox(patient, **SHORT_LOG, **{"max.message.bytes": str(_LIMIT)}) as settings:
        start = programs.drain(settings).cpu
        with psycopg.connect(settings.dsn) as connection:
            connection.execute(_REFUSED, {"hashes": _HASHES, "aggregates": count})
        assert programs.drain(settings).events == 0
        with psycopg.connect(settings.dsn) as connection:
            assert connection.execute("SELECT count(*) FROM outbox_parked").fetchone() == (count,)
            ((position,),) = connection.execute("SELECT done::text FROM outbox_shards").fetchall()
        rounds = _rounds(settings, count, start) if count else {}
        fill(settings, sizes.others)
        busy = settings.model_copy(update={"retry_seconds": 0.5})
        drains = [_others(busy, position) for _ in range(_ROUNDS)]
        _retry(settings)
        with (
            latency.running(busy, "relay"),
            programs.running(settings, "benchmarks.load", settings.dsn, 2, 1000),
        ):
            listened = latency.listen(settings, seconds=sizes.listening)
        attempts = state.value(settings, _ATTEMPTS)
    return {
        "drain of the others": median(sizes.others / taken for taken, _ in drains),
        "peak memory of the relay": max(memory for _, memory in drains),
        "the others at 1,000/s, p50": median(listened),
        "the others at 1,000/s, p99": p99(listened),
        **({"attempts in that time": attempts} if count else {}),
        **rounds,
    }


def _others(settings: Settings, position: str) -> tuple[float, float]:
    """Publish all others beside retries, from a position on; return seconds, and the peak memory in bytes."""
    with psycopg.connect(settings.dsn) as connection:
        connection.execute(_BACK, [position])
    _retry(settings)
    last = state.value(settings, _LAST)
    with latency.running(settings, "relay") as relay:
        state.await_value(settings, "SELECT count(owner) FROM outbox_shards", 1, seconds=30)
        return state.await_covered(settings, last, seconds=120), state.peak(relay)


def _rounds(settings: Settings, count: int, start: float) -> dict[str, float]:
    """Each blocked aggregate's first event is tried once, and nothing else happens.

    Args:
        start: CPU of a relay that finds nothing to do.
    """
    taken: dict[str, list[float]] = {"seconds": [], "relay": [], "server": []}
    for _ in range(_ROUNDS):
        _retry(settings)
        before = state.server_cpu(settings)
        drain = programs.drain(settings)
        assert state.value(settings, _ATTEMPTS) == count
        taken["seconds"].append(drain.seconds)
        taken["relay"].append(drain.cpu - start)
        taken["server"].append(state.server_cpu(settings) - before)
    return {
        "a round of retries": median(taken["seconds"]),
        "a round, CPU of the relay": median(taken["relay"]),
        "a round, CPU of PostgreSQL": median(taken["server"]),
    }


def _retry(settings: Settings) -> None:
    with psycopg.connect(settings.dsn) as connection:
        connection.execute(_DUE)
