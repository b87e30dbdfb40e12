"""A backlog that grows tenfold: rate, memory and CPU of its drain, sizes of the table."""

from __future__ import annotations

import time
from statistics import median
from typing import Final

from benchmarks import programs
from benchmarks.scale import state
from benchmarks.scale.filling import fill
from benchmarks.scale.growth import FLAT, Figure, megabytes, milliseconds, rate, seconds, table
from benchmarks.scale.sizes import Sizes
from benchmarks.servers import SHORT_LOG, fresh_outbox, rewind
from benchmarks.table import Row
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.settings import Settings

# As many drains as make up for the short ones; the largest is drained once.
_EVENTS_A_SIZE: Final = 3_000_000
_MOST_ROUNDS: Final = 5
_LOOKS: Final = 5
_FIGURES: Final = (
    Figure("drain", rate, FLAT),
    Figure("peak memory of the relay", megabytes, FLAT),
    Figure("CPU of the relay for 100,000", seconds, FLAT),
    Figure("CPU of PostgreSQL for 100,000", seconds, FLAT),
    Figure("table for 100,000", megabytes, FLAT),
    Figure("indexes for 100,000", megabytes, FLAT),
    Figure("reading the metrics beside it", milliseconds, "bounded"),
)


def measure(servers: Settings, sizes: Sizes) -> list[Row]:
    """Rows of the table."""
    found = {f"{events:,}": _at(servers, events) for events in sizes.backlog}
    return table("backlog of {}", _FIGURES, found)


def _at(servers: Settings, events: int) -> dict[str, float]:
    with fresh_outbox(servers, **SHORT_LOG) as settings:
        # What a start costs is not the drain's.
        start = programs.drain(settings).cpu
        fill(settings, events)
        looks = [_look(settings) for _ in range(_LOOKS)]
        rates, peaks, cpu, server = [], [], [], []
        for n in range(max(1, min(_MOST_ROUNDS, _EVENTS_A_SIZE // events))):
            if n:
                rewind(settings)
            before = state.server_cpu(settings)
            drain = programs.drain(settings)
            assert drain.events == events, drain
            rates.append(drain.rate)
            peaks.append(drain.peak * 1024 * 1024)
            cpu.append(drain.cpu - start)
            server.append(state.server_cpu(settings) - before)
        stored, indexes = state.outbox_sizes(settings)
    share = 100_000 / events
    return {
        "drain": median(rates),
        "peak memory of the relay": max(peaks),
        "CPU of the relay for 100,000": median(cpu) * share,
        "CPU of PostgreSQL for 100,000": median(server) * share,
        "table for 100,000": stored * share,
        "indexes for 100,000": indexes * share,
        "reading the metrics beside it": median(looks),
    }


def _look(settings: Settings) -> float:
    started = time.perf_counter()
    outbox_measurements.read(settings)
    return time.perf_counter() - started
