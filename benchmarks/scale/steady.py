"""A rate of writing that grows tenfold and lasts: what the relay sustains, its lag, and what grows.

As a program: ``python -m benchmarks.scale.steady DSN RATE SECONDS`` writes; prints events and seconds.

Invariants:
- The events of 10 ms share a transaction, from each of two sessions: at 50,000 a second, single ones would
  measure the writers.
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

import psycopg
from confluent_kafka import OFFSET_END, Consumer, TopicPartition

from benchmarks import latency, programs
from benchmarks.scale import state
from benchmarks.scale.growth import FLAT, Figure, megabytes, milliseconds, number, p99, rate, seconds, table
from benchmarks.scale.sizes import Sizes
from benchmarks.servers import SHORT_LOG, fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.settings import Settings

_SESSIONS: Final = 2
_EVERY: Final = 0.01
_WARM: Final = 3.0
# Of a lower rate, which is only compared.
_SHORT: Final = 15.0
_WRITE: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', ((%(first)s + i) %% 20000)::text, 'order.placed',
       jsonb_build_object('at', extract(epoch FROM statement_timestamp()), 'n', %(first)s + i)
FROM generate_series(1, %(events)s) i"""
_PUBLISHED: Final = "SELECT coalesce(sum(events), 0)::float8 FROM outbox_progress"
_FIGURES: Final = (
    Figure("written", rate),
    Figure("published", rate),
    Figure("insert → consumer, p50", milliseconds),
    Figure("insert → consumer, p99", milliseconds),
    Figure("CPU of the relay for 100,000", seconds, "falls"),
    Figure("unpublished at the end", number),
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
        cpu, published = programs.cpu_seconds(relay), state.value(settings, _PUBLISHED)
        moments: list[_Moment] = []
        end = threading.Event()
        looking = threading.Thread(target=_look, args=(settings, relay, moments, end))
        looking.start()
        started = time.monotonic()
        lags = _lags(settings, lasts)
        took = time.monotonic() - started
        gone = state.value(settings, _PUBLISHED) - published
        cpu = programs.cpu_seconds(relay) - cpu
        end.set()
        looking.join()
        assert writer.stdout is not None
        events, wrote = map(float, writer.stdout.read().split())
        left = events - state.value(settings, _PUBLISHED)
        state.await_value(settings, _PUBLISHED, events, seconds=60 + lasts)
    waited = [lag for _, lag in lags]
    values = (events / wrote, gone / took, median(waited), p99(waited), cpu / gone * 100_000, max(left, 0.0))
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
            f"{show(max(before))}, {show(max(after))}",
            f"{max(after) / max(before):.2f} ×" if max(before) else "",
            FLAT,
        )
        for name, show, before, after in pairs
    ]
    early = p99([lag for at, lag in lags if at <= lags[0][0] + part])
    late = p99([lag for at, lag in lags if at >= lags[-1][0] - part])
    shown = f"{milliseconds(early)}, {milliseconds(late)}"
    return [*rows, Row(f"{what}: p99, first and last {part:,.0f} s", shown, f"{late / early:.2f} ×", FLAT)]


def _look(settings: Settings, relay: int, moments: list[_Moment], end: threading.Event) -> None:
    while not end.is_set():
        moments.append(_Moment(time.monotonic(), state.resident(relay), state.stored(settings)))
        end.wait(1.0)


def _lags(settings: Settings, lasts: float) -> list[tuple[float, float]]:
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
        "benchmarks.scale.steady",
        settings.dsn.reveal(),
        str(offered),
        str(lasts),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _write(dsn: str, session: int, offered: float, lasts: float, written: list[int]) -> None:
    """Write at this rate, or as fast as it goes; add what was written."""
    each = round(offered * _EVERY) if offered * _EVERY >= 1 else 1
    every = each / offered
    with psycopg.connect(dsn, autocommit=True) as connection:
        began = time.monotonic()
        n = 0
        while time.monotonic() < began + lasts:
            time.sleep(max(0.0, began + n * every - time.monotonic()))
            first = (n * _SESSIONS + session) * each
            connection.execute(_WRITE, {"first": first, "events": each}, prepare=True)
            n += 1
    written.append(n * each)


if __name__ == "__main__":
    dsn, offered, lasts = sys.argv[1], float(sys.argv[2]) / _SESSIONS, float(sys.argv[3])
    written: list[int] = []
    began = time.monotonic()
    threads = [
        threading.Thread(target=_write, args=(dsn, session, offered, lasts, written))
        for session in range(_SESSIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(written), time.monotonic() - began)
