"""A rate of writing that grows tenfold and lasts: what the relay sustains, its lag, and what grows.

Invariants:
- Events of 10 ms share a transaction: at 50,000 a second, single ones would measure the writers.
- Payloads are small, so that ten minutes at the highest rate fit on a disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from statistics import median
from typing import Final, NamedTuple

from confluent_kafka import OFFSET_END, Consumer, TopicPartition

from benchmarks import latency, programs
from benchmarks.scale import state
from benchmarks.scale.growth import FLAT, Figure, megabytes, milliseconds, number, p99, rate, seconds, table
from benchmarks.scale.sizes import Sizes
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Ratio, Row
from outbox_pipelines.settings import Settings

_WARM: Final = 3.0
# Of a lower rate, which is only compared.
_SHORT: Final = 15.0
# Between the first and the last row of progress in that time: there is one a second.
_RATE: Final = """
SELECT (sum(events) FILTER (WHERE NOT is_first) / extract(epoch FROM max(at) - min(at)))::float8
FROM (SELECT at, events, at = min(at) OVER () AS is_first
      FROM outbox_progress WHERE at >= to_timestamp(%s)) AS progress"""
_PUBLISHED: Final = "SELECT coalesce(sum(events), 0)::float8 FROM outbox_progress"
_FIGURES: Final = (
    Figure("written", rate),
    Figure("published", rate, "as written"),
    Figure("insert → consumer, p50", milliseconds),
    Figure("insert → consumer, p99", milliseconds),
    Figure("CPU of the relay for 100,000", seconds, "falls"),
    Figure("until all is recorded as published, after the last", seconds, "≤ 2 s"),
)


class _Moment(NamedTuple):
    """What is looked at every second."""

    at: float
    resident: float
    stored: state.Stored


def measure(servers: Settings, sizes: Sizes) -> list[Row]:
    """Rows of the table."""
    found: dict[str, dict[str, float]] = {}
    flat: list[Row] = []
    for offered in sizes.rates:
        is_last = offered == sizes.rates[-1]
        lasts = sizes.seconds if is_last else min(_SHORT, sizes.seconds)
        with fresh_outbox(servers, **SHORT_LOG) as settings:
            found[f"{offered:,}"], moments, lags = _at(settings, offered, lasts)
        if is_last:
            flat = _flat(f"{offered:,} events/s for {lasts:,.0f} s", lasts, moments, lags)
    return [*table("{} events/s offered", _FIGURES, found), *flat]


def _at(
    settings: Settings, offered: int, lasts: float
) -> tuple[dict[str, float], list[_Moment], list[tuple[float, float]]]:
    with latency.running(settings, "relay") as relay, _writing(settings, offered, _WARM + lasts) as writer:
        time.sleep(_WARM)
        began, cpu, before = time.time(), programs.cpu_seconds(relay), state.value(settings, _PUBLISHED)
        moments: list[_Moment] = []
        end = threading.Event()
        looking = threading.Thread(target=_look, args=(settings, relay, moments, end))
        looking.start()
        lags = arrivals(settings, lasts)
        cpu = programs.cpu_seconds(relay) - cpu
        published = state.value(settings, _PUBLISHED) - before
        sustained = state.value(settings, _RATE, began)
        end.set()
        looking.join()
        assert writer.stdout is not None
        events, wrote = map(float, writer.stdout.read().split())
        caught_up = time.monotonic()
        state.await_value(settings, _PUBLISHED, events, seconds=60 + lasts)
        behind = time.monotonic() - caught_up
    waited = [lag for _, lag in lags]
    values = (events / wrote, sustained, median(waited), p99(waited), cpu / published * 100_000, behind)
    return dict(zip((figure.name for figure in _FIGURES), values, strict=True)), moments, lags


def _flat(what: str, lasts: float, moments: list[_Moment], lags: list[tuple[float, float]]) -> list[Row]:
    """Compare the first minute with the last; of a shorter time, the first fifth."""
    part = min(60.0, lasts / 5)
    begun, over = moments[0].at, moments[-1].at
    first = [moment for moment in moments if moment.at <= begun + part]
    last = [moment for moment in moments if moment.at >= over - part]
    pairs = (
        ("memory of the relay", megabytes, [m.resident for m in first], [m.resident for m in last]),
        (
            "size of the state tables",
            megabytes,
            [m.stored.size for m in first],
            [m.stored.size for m in last],
        ),
        ("their dead rows", number, [m.stored.dead for m in first], [m.stored.dead for m in last]),
    )
    rows = [
        Row(
            f"{what}: {name}, first and last {part:,.0f} s",
            (show(max(before)), show(max(after))),
            (Ratio(max(after) / max(before), "the first"),) if max(before) else (),
            FLAT,
        )
        for name, show, before, after in pairs
    ]
    early = p99([lag for at, lag in lags if at <= lags[0][0] + part])
    late = p99([lag for at, lag in lags if at >= lags[-1][0] - part])
    figures = (milliseconds(early), milliseconds(late))
    ratio = (Ratio(late / early, "the first"),)
    return [*rows, Row(f"{what}: p99, first and last {part:,.0f} s", figures, ratio, FLAT)]


def _look(settings: Settings, relay: int, moments: list[_Moment], end: threading.Event) -> None:
    while not end.is_set():
        moments.append(_Moment(time.monotonic(), state.resident(relay), state.stored(settings)))
        end.wait(1.0)


def arrivals(settings: Settings, lasts: float) -> list[tuple[float, float]]:
    """Return when each of the messages of one partition came, and how many seconds after its insert."""
    topic = settings.topic.format(aggregate_type="order")
    consumer = Consumer({"bootstrap.servers": settings.kafka, "group.id": topic, "fetch.wait.max.ms": 100})
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    found: list[tuple[float, float]] = []
    until = time.monotonic() + lasts
    try:
        while time.monotonic() < until:
            message = consumer.poll(0.1)
            if message is not None and not message.error():
                found.append((time.monotonic(), time.time() - json.loads(message.value() or b"")["at"]))
        return found
    finally:
        consumer.close()


def _writing(settings: Settings, offered: int, lasts: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.scale.writer",
        settings.dsn.reveal(),
        str(offered),
        str(lasts),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
