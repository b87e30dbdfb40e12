"""One transaction that stays open while others write, ten times as much each: an hour of it, in minutes.

Invariants:
- It is open all the time, has written an event, and holds vacuum back; only the time is simulated. The
  events of an hour at 1,000/s are written at once, and the position is moved as often as in that time.
- The sizes are those of one outbox, one after the other: nothing is cleaned up in between.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import latency, programs
from benchmarks.scale import state
from benchmarks.scale.filling import fill
from benchmarks.scale.growth import FLAT, Figure, megabytes, milliseconds, number, p99, rate, seconds, table
from benchmarks.scale.sizes import Sizes
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.read.slot.slot_setup import remove, set_up
from outbox_pipelines.settings import Settings

# At 1,000 events a second: a settle waits 10 ms for the next.
_EVENTS_A_SETTLE: Final = 10
_LATE: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', 'late', 'order.placed', '{}')"""
# The relay's own statement for a position that moves, but for the position.
_SETTLES: Final = """
DO $$ DECLARE at tid; BEGIN
SELECT ctid INTO at FROM outbox_shards WHERE shard = 0;
FOR i IN 1..%d LOOP
    UPDATE outbox_shards SET heartbeat = clock_timestamp()
    WHERE ctid = at AND shard = 0 RETURNING ctid INTO at;
    IF i %% 100 = 0 THEN COMMIT; END IF;
END LOOP; END $$"""
_VERSIONS: Final = "SELECT pg_stat_get_dead_tuples('outbox_shards'::regclass)::float8"
_SIZE: Final = "SELECT pg_total_relation_size('outbox_shards')::float8"
RETAINED: Final = """
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::float8 FROM pg_replication_slots
WHERE database = current_database()"""
_FIGURES: Final = (
    Figure("drain of the others", rate, FLAT),
    Figure("peak memory of the relay", megabytes, FLAT),
    Figure("the others at 1,000/s, p50", milliseconds, FLAT),
    Figure("the others at 1,000/s, p99", milliseconds),
    Figure("dead versions of the position", number),
    Figure("their size", megabytes, "≤ 10 ×"),
    Figure("finding the position by its key", milliseconds),
    Figure("reading the metrics beside it", milliseconds),
)
_SLOT_FIGURES: Final = (
    Figure("drain of the others from a slot", rate, FLAT),
    Figure("peak memory of the relay", megabytes, FLAT),
    Figure("WAL retained for the slot", megabytes, "≤ 10 ×"),
    Figure("restart of the relay: to its first event", seconds),
)
_LOOKS: Final = 9


def measure(servers: Settings, sizes: Sizes) -> list[Row]:
    """Rows of the table."""
    return [*_between_snapshots(servers, sizes), *_from_a_slot(servers, sizes)]


def _between_snapshots(servers: Settings, sizes: Sizes) -> list[Row]:
    found: dict[str, dict[str, float]] = {}
    with fresh_outbox(servers, **SHORT_LOG) as settings, psycopg.connect(settings.dsn) as late:
        found["0"] = _beside(settings, sizes, sizes.late[0], settles=0)
        late.execute(_LATE)
        written = 0
        for size in sizes.late:
            found[f"{size:,}"] = _beside(
                settings, sizes, size - written, settles=(size - written) // _EVENTS_A_SETTLE
            )
            written = size
        with latency.running(settings, "relay"):
            ended = _ended(settings, late)
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            connection.execute("VACUUM outbox_shards")
        left = state.value(settings, _VERSIONS)
    return [
        *table("{} events beside an open transaction", _FIGURES, found, base="0"),
        Row("the open transaction's own event, after its commit", (milliseconds(ended),), goal="≤ 100 ms"),
        Row("dead versions after the next vacuum", (number(left),), goal="0"),
    ]


def _beside(settings: Settings, sizes: Sizes, events: int, *, settles: int) -> dict[str, float]:
    fill(settings, events)
    drain = programs.drain(settings)
    assert drain.events == events, drain
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute((_SETTLES % settles).encode())
        connection.execute("SELECT pg_stat_force_next_flush()")
    with (
        latency.running(settings, "relay"),
        programs.running(settings, "benchmarks.load", settings.dsn, 2, 1000),
    ):
        listened = latency.listen(settings, seconds=sizes.listening)
    programs.drain(settings)
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        finding = median(
            _timed(lambda: connection.execute(relay_sql.CHANGE, {"shard": 0})) for _ in range(_LOOKS)
        )
    return {
        "drain of the others": drain.rate,
        "peak memory of the relay": drain.peak * 1024 * 1024,
        "the others at 1,000/s, p50": median(listened),
        "the others at 1,000/s, p99": p99(listened),
        "dead versions of the position": state.value(settings, _VERSIONS),
        "their size": state.value(settings, _SIZE),
        "finding the position by its key": finding,
        "reading the metrics beside it": median(
            _timed(lambda: outbox_measurements.read(settings)) for _ in range(_LOOKS)
        ),
    }


def _ended(settings: Settings, late: psycopg.Connection[Any]) -> float:
    """Commit; return after how many seconds the position covers the transaction's event."""
    ((seq,),) = late.execute("SELECT seq FROM outbox WHERE aggregate_id = 'late'").fetchall()
    state.await_value(settings, "SELECT count(owner) FROM outbox_shards", 1, seconds=30)
    late.commit()
    return state.await_covered(settings, seq, seconds=30)


def _from_a_slot(servers: Settings, sizes: Sizes) -> list[Row]:
    found: dict[str, dict[str, float]] = {}
    with fresh_outbox(servers, **SHORT_LOG) as settings:
        set_up(settings, seconds=60, say=lambda line: None)
        try:
            # Up to the beginning of the slot, it reads between snapshots.
            programs.drain(settings)
            with psycopg.connect(settings.dsn) as late:
                late.execute(_LATE)
                written = 0
                # A slot is decoded from the beginning of the open transaction at each start: two sizes tell.
                for size in sizes.late[:2]:
                    found[f"{size:,}"] = _slot_beside(settings, size - written)
                    written = size
        finally:
            remove(settings, seconds=60, say=lambda line: None)
    return table("slot, {} events beside an open transaction", _SLOT_FIGURES, found)


def _slot_beside(settings: Settings, events: int) -> dict[str, float]:
    fill(settings, events)
    drain = programs.drain(settings)
    assert drain.events == events, drain
    retained = state.value(settings, RETAINED)
    fill(settings, 1)
    again = programs.drain(settings)
    assert again.events == 1, again
    return {
        "drain of the others from a slot": drain.rate,
        "peak memory of the relay": drain.peak * 1024 * 1024,
        "WAL retained for the slot": retained,
        "restart of the relay: to its first event": again.seconds,
    }


def _timed(do: Any) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started
