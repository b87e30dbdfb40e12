"""From the insert to the consumer, measured by a consumer; and what an idle relay costs."""

from __future__ import annotations

import json
import time
import uuid
from statistics import median, quantiles

from confluent_kafka import Consumer

from benchmarks import programs
from benchmarks.servers import fill, fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.relay import status
from outbox_pipelines.settings import Settings

_SECONDS = 15.0
_IDLE_SECONDS = 15.0


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rows = []
    with fresh_outbox(servers) as settings, programs.running(settings, "outbox_pipelines", "relay") as relay:
        # A broker in production has its code compiled; one of a minute's age competes with its compiler.
        fill(settings, 400_000)
        _wait_until_empty(settings)
        with programs.running(settings, "benchmarks.load", settings.dsn, 2, 1000):
            _listen(settings)
        for rate, clients in ((100, 1), (1000, 2)):
            with programs.running(settings, "benchmarks.load", settings.dsn, clients, rate):
                found = _listen(settings)
            p50, p99 = median(found), quantiles(found, n=100)[98]
            rows.append(
                Row(
                    f"insert → consumer at {rate:,}/s ({len(found):,} events)",
                    f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms",
                    "",
                    "p50 ≤ 6, p99 ≤ 25 ms",
                )
            )
        time.sleep(3)
        before = programs.cpu_seconds(relay)
        time.sleep(_IDLE_SECONDS)
        idle = (programs.cpu_seconds(relay) - before) / _IDLE_SECONDS
        rows.append(Row("idle relay", f"{idle:.1%} of a core", "", "≤ 2 %"))
    return rows


def _wait_until_empty(settings: Settings) -> None:
    deadline = time.monotonic() + 60
    while status.read(settings).shards[0].backlog:
        assert time.monotonic() < deadline, "the relay does not publish"
        time.sleep(0.1)


def _listen(settings: Settings) -> list[float]:
    """Seconds from just before each insert until a consumer had its message."""
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "latest",
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([settings.topic.format(aggregate_type="order")])
    found: list[float] = []
    try:
        warm_until = time.monotonic() + 4
        until = warm_until + _SECONDS
        while (now := time.monotonic()) < until:
            # Not consume(n): it adds its timeout.
            message = consumer.poll(0.1)
            if message is None or message.error() or now < warm_until:
                continue
            found.append(time.time() - json.loads(message.value() or b"")["at"])
        return found
    finally:
        consumer.close()
