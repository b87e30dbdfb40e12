"""What a database and its processes hold and use: sizes, dead rows, memory, CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, LiteralString, NamedTuple

import psycopg

from benchmarks import programs
from outbox_pipelines.settings import Settings

_OUTBOX: Final = """
SELECT sum(pg_table_size(inhrelid))::float8, sum(pg_indexes_size(inhrelid))::float8
FROM pg_inherits WHERE inhparent = 'outbox'::regclass"""
# What the relay writes, beside the outbox itself.
STATE: Final = ("outbox_shards", "outbox_progress", "outbox_parked", "outbox_released")
_STATE: Final[LiteralString] = """
SELECT sum(pg_total_relation_size(t::regclass))::float8, sum(pg_stat_get_dead_tuples(t::regclass))::float8
FROM unnest(%s::text[]) t"""

_COVERED: Final = """
SELECT outbox_covers(done, target, last_seq, tx, seq) FROM outbox_shards, outbox
WHERE shard = 0 AND seq = %(seq)s"""


class Stored(NamedTuple):
    """Bytes of the state tables, and their dead rows as PostgreSQL counts them."""

    size: float
    dead: float


def outbox_sizes(settings: Settings) -> tuple[float, float]:
    """Return the bytes of the outbox's tables, and those of their indexes."""
    ((table, indexes),) = _rows(settings, _OUTBOX)
    return table, indexes


def stored(settings: Settings) -> Stored:
    """Return what the state tables hold."""
    ((size, dead),) = _rows(settings, _STATE, [list(STATE)])
    return Stored(size, dead)


def value(settings: Settings, query: LiteralString, *given: object) -> float:
    """Return the one value of a query."""
    ((found,),) = _rows(settings, query, list(given))
    return float(found or 0)


def resident(pid: int) -> float:
    """Return the resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def server_cpu(settings: Settings) -> float:
    """Return the seconds of CPU of the whole database server since its start (Linux)."""
    with psycopg.connect(settings.dsn) as connection:
        session = Path(f"/proc/{connection.info.backend_pid}/stat").read_text()
        postmaster = int(session.rsplit(")", 1)[1].split()[1])
        return programs.tree_cpu_seconds(postmaster)


def await_value(settings: Settings, query: LiteralString, least: float, *, seconds: float) -> None:
    """Wait until a query answers with at least so much.

    Raises:
        AssertionError: it does not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while (found := value(settings, query)) < least:
        assert time.monotonic() < deadline, f"{query}: {found}, not {least}"
        time.sleep(0.05)


def peak(pid: int) -> float:
    """Return the largest resident memory that a process has had, in bytes."""
    return float(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def await_covered(settings: Settings, seq: float, *, seconds: float) -> float:
    """Wait until the position covers an event; return how long it took, in seconds.

    Raises:
        AssertionError: it does not within so many seconds.
    """
    started = time.perf_counter()
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        while connection.execute(_COVERED, {"seq": int(seq)}).fetchone() != (True,):
            assert time.perf_counter() - started < seconds, f"event {seq:.0f} is not published"
            time.sleep(0.002)
    return time.perf_counter() - started


def _rows(
    settings: Settings, query: LiteralString, values: list[object] | None = None
) -> list[tuple[float, ...]]:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        return connection.execute(query, values).fetchall()
