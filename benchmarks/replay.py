"""Replays of an archived day: events a second, CPU and memory; and how long live events of the topic wait."""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median
from typing import Final

from benchmarks import latency, programs, usage
from benchmarks.past import ago, fill_day
from benchmarks.quick import sized
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Figure, Ratio, Row, memory, milliseconds, p99, rate
from outbox_pipelines.days.archive import day, drop
from outbox_pipelines.settings import Settings, load_settings

_EVENTS: Final = sized(1_000_000, 100_000)
_ROUNDS: Final = sized(3, 1)
_LIVE: Final = 1_000
_SECONDS: Final = sized(20.0, 3.0)
_RATE: Final = 10_000


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with (
        fresh_outbox(servers, **SHORT_LOG) as fresh,
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory,
    ):
        # One topic for all types.
        settings = fresh.model_copy(update={"topic": fresh.topic.format(aggregate_type="order")})
        archived = settings.model_copy(update={"archive": directory})
        fill_day(settings, ago(2), _EVENTS)
        day.archive(archived, ago(2))
        assert drop.drop(archived, ago(2), early=True).now
        rows = [
            _speed(settings.model_copy(update={"delivery": delivery}), directory)
            for delivery in ("at_least_once", "exactly_once")
        ]
        with programs.running(settings, "outbox_pipelines", "relay"):
            latency.warm(settings)
            alone = _live(settings)
            with programs.running(settings, "benchmarks.replay", directory, _RATE):
                beside = _live(settings)
    return [
        *rows,
        Row(
            f"live events at {_LIVE:,}/s beside a replay of {_RATE:,}/s into their topic",
            (milliseconds(beside[0], "p50"), milliseconds(beside[1], "p99")),
            (Ratio(beside[1] / alone[1], "alone", "p99"),),
            "≤ 1.5 ×",
        ),
    ]


def _speed(settings: Settings, directory: str) -> Row:
    found = [programs.run(settings, "replay", directory, 10**9) for _ in range(_ROUNDS)]
    events, cpu, peak = (median(column) for column in zip(*found, strict=True))
    return Row(
        f"replay of {_EVENTS:,} archived events, {settings.delivery}",
        (rate(events), Figure(cpu, "µs of CPU each"), memory([peak])),
        goal="≥ 100,000, < 300 MB",
    )


def _live(settings: Settings) -> tuple[float, float]:
    """Median and 99th percentile, in seconds."""
    with programs.running(settings, "benchmarks.load", settings.dsn, 2, _LIVE):
        found = latency.listen(settings, seconds=_SECONDS)
    return median(found), p99(found)


def main(directory: str, rate: float) -> None:
    """Replay the archived day; print events a second, µs of CPU an event, and the peak of memory in MB."""
    from outbox_pipelines.replay import replays
    from outbox_pipelines.replay.selection import Selection

    started = time.perf_counter()
    done = replays.begin(
        load_settings(archive=directory),
        Selection(until=str(ago(2))),
        "{topic}",
        reason="a benchmark",
        actor="benchmarks",
        creates=True,
        rate=rate,
        is_stopped=lambda: False,
        progress=lambda *_: None,
    )
    seconds = time.perf_counter() - started
    print(done.sent / seconds, usage.cpu() / done.sent * 1e6, usage.peak())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
