"""What a shard reads of a backlog: each shard's share, one after the other, with nothing published.

As a program: ``python -m benchmarks.shard_reads SHARDS [filter]`` reads all events and prints a `Read`.

Invariants:
- `filter` reads as if no index had lanes: each shard reads the rows of all, and leaves out those of others.
- The shards take turns, so that each has a core: side by side on two cores they would measure the cores.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Final, NamedTuple
from unittest import mock

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Figure, Ratio, Row, rate
from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.read.snapshots import SnapshotSource
from outbox_pipelines.settings import Settings, load_settings

_EVENTS: Final = sized(400_000, 40_000)
_ROUNDS: Final = sized(5, 1)
_ONE: Final = "1 shard"
_WAYS: Final = {
    _ONE: (1, ""),
    "4 shards": (4, ""),
    "16 shards": (16, ""),
    "4 shards that filter": (4, "filter"),
    "16 shards that filter": (16, "filter"),
}


class Read(NamedTuple):
    """What the shards took together."""

    events: float
    seconds: float
    """Of the slowest shard."""
    cpu: float
    """Seconds of CPU of all readers and of their sessions."""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    reads: dict[str, list[Read]] = {way: [] for way in _WAYS}
    with fresh_outbox(servers) as settings:
        fill(settings, _EVENTS)
        rewind(settings)
        # In turn, so that a drift of the machine falls on all alike.
        for _ in range(_ROUNDS):
            for way, (shards, kind) in _WAYS.items():
                reads[way].append(Read(*programs.run(settings, "shard_reads", shards, kind)))
                assert reads[way][-1].events == _EVENTS, reads
    rates = {way: median(read.events / read.seconds for read in found) for way, found in reads.items()}
    costs = {way: median(read.cpu / read.events * 1e6 for read in found) for way, found in reads.items()}
    return [
        Row(
            f"reading {_EVENTS:,} by {way}, a core each",
            (rate(rates[way]), Figure(costs[way], "µs of CPU each")),
            (Ratio(rates[way] / rates[_ONE], "one's rate"), Ratio(costs[way] / costs[_ONE], "its CPU")),
        )
        for way in _WAYS
    ]


def _read(settings: Settings, shards: int, kind: str) -> Read:
    reading = relay_sql.SHARD_EVENTS
    if kind == "filter":
        reading = relay_sql.Reading(*(query.replace(" BETWEEN", " - 0 BETWEEN") for query in reading))
    events, slowest, cpu = 0, 0.0, 0.0
    with mock.patch.object(relay_sql, "SHARD_EVENTS", reading):
        for shard in range(shards):
            with psycopg.connect(settings.dsn, autocommit=True) as connection:
                row = connection.execute("SELECT done::text FROM outbox_shards").fetchone()
                assert row is not None
                source = SnapshotSource(
                    connection,
                    Position(Snapshot.parse(row[0])),
                    batch_events=settings.batch_events,
                    batch_bytes=settings.batch_bytes,
                    shard=shard,
                    shards=shards,
                )
                began, used = time.perf_counter(), time.process_time()
                session = programs.cpu_seconds(connection.info.backend_pid)
                while (batch := source.read()) is not None:
                    events += len(batch.events)
                slowest = max(slowest, time.perf_counter() - began)
                cpu += programs.cpu_seconds(connection.info.backend_pid) - session
                cpu += time.process_time() - used
    return Read(events, slowest, cpu)


if __name__ == "__main__":
    print(*_read(load_settings(), int(sys.argv[1]), sys.argv[2]))
