"""From the insert to the consumer, measured by a consumer, beside Debezium; and what an idle relay costs."""

from __future__ import annotations

import json
import math
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from confluent_kafka import Consumer

from benchmarks import debezium, limits, programs
from benchmarks.quick import sized
from benchmarks.servers import fill, fresh_outbox
from benchmarks.table import Figure, Ratio, Row, milliseconds, p99
from outbox_pipelines.settings import Settings

_SECONDS: Final = sized(15.0, 4.0)
_IDLE_SECONDS: Final = sized(15.0, 4.0)
_RATES: Final = ((100, 1), (1000, 2))
# What makes Debezium as quick as it gets.
_QUICK: Final[dict[str, object]] = {"poll.interval.ms": 5, "producer.override.linger.ms": 0}
DEBEZIUM: Final = "Debezium tuned for latency"
_GOALS: Final = {
    "relay": "p50 and p99 ≤ 0.8 ×",
    "relay, exactly_once": "p50 ≤ 1.5 ×, p99 ≤ 2 ×",
    "relay from a slot": "p50 ≤ 3, p99 ≤ 10 ms",
}


class Latency(NamedTuple):
    """What a consumer measured."""

    name: str
    rate: int
    """Events a second."""
    p50: float
    """In seconds, as p99."""
    p99: float
    limit: float
    """Of a commit and a round trip to the broker, measured just before, in seconds."""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    found: list[Latency] = []
    resting: list[Row] = []
    for name in ("relay", "relay, exactly_once", DEBEZIUM):
        with fresh_outbox(servers) as settings, running(settings, name) as pid:
            warm(settings)
            found += [at_rate(settings, name, rate, clients) for rate, clients in _RATES]
            if name == "relay":
                resting.append(idle(pid, name))
    return [*rows(found), *resting]


def rows(found: list[Latency]) -> list[Row]:
    """Return a row for each, with its ratios to Debezium at the same rate and to the limit."""
    debezium = {each.rate: each for each in found if each.name == DEBEZIUM}
    return [_row(each, debezium[each.rate]) for each in found]


def _row(each: Latency, debezium: Latency) -> Row:
    ratios = [Ratio(each.p99 / each.limit, "the limit", "p99")]
    if each.name != DEBEZIUM:
        ratios = [
            Ratio(each.p50 / debezium.p50, "Debezium", "p50"),
            Ratio(each.p99 / debezium.p99, "Debezium", "p99"),
            *ratios,
        ]
    figures = (milliseconds(each.p50, "p50"), milliseconds(each.p99, "p99"))
    return Row(name_of(each.name, each.rate), figures, tuple(ratios), _GOALS.get(each.name, ""))


def name_of(name: str, rate: int) -> str:
    """Return the name of a row."""
    return f"latency at {rate:,}/s: {name}"


def warm(settings: Settings) -> None:
    """Publish many events: a broker of a minute's age competes with its compiler."""
    fill(settings, sized(400_000, 100_000))
    with programs.running(settings, "benchmarks.load", settings.dsn, 2, 1000):
        _await_news(settings)
        listen(settings)


@contextmanager
def running(settings: Settings, name: str) -> Iterator[int]:
    """One of them, at work; its process."""
    if name.startswith("relay"):
        delivery = "exactly_once" if "exactly_once" in name else "at_least_once"
        chosen = settings.model_copy(update={"delivery": delivery})
        with programs.running(chosen, "outbox_pipelines", "relay") as relay:
            yield relay.pid
    else:
        routed = {debezium.ROUTED: settings.topic.format(aggregate_type="${routedByValue}")}
        with (
            tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
            debezium.running(
                settings.dsn, settings.kafka, Path(folder) / "debezium", {**_QUICK, **routed}, heap="2g"
            ) as server,
        ):
            yield server.pid


def at_rate(settings: Settings, name: str, rate: int, clients: int) -> Latency:
    """Measure a rate, in events a second."""
    limit = sum(limits.write_and_send(settings))
    with programs.running(settings, "benchmarks.load", settings.dsn, clients, rate):
        found = listen(settings)
    return Latency(name, rate, median(found), p99(found), limit)


def idle(pid: int, name: str) -> Row:
    """Return what a relay costs that has nothing to do."""
    time.sleep(3)
    before = programs.cpu_seconds(pid)
    time.sleep(_IDLE_SECONDS)
    share = (programs.cpu_seconds(pid) - before) / _IDLE_SECONDS
    return Row(f"idle: {name}", (Figure(share * 100, "% of a core"),), goal="≤ 2 %")


def _await_news(settings: Settings) -> None:
    """Until what is written now arrives: the backlog is published."""
    deadline = time.monotonic() + 120
    while min(listen(settings, warm=2, seconds=1), default=math.inf) > 1:
        assert time.monotonic() < deadline, "nothing is published"


def listen(settings: Settings, *, warm: float = 4, seconds: float = _SECONDS) -> list[float]:
    """Seconds from just before each insert until a consumer had its message."""
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "latest",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([settings.topic.format(aggregate_type="order")])
    found: list[float] = []
    try:
        warm_until = time.monotonic() + warm
        until = warm_until + seconds
        while (now := time.monotonic()) < until:
            # Not consume(n): it adds its timeout.
            message = consumer.poll(0.1)
            if message is None or message.error() or now < warm_until:
                continue
            at = json.loads(message.value() or b"").get("at")
            if at is not None:
                found.append(time.time() - at)
        return found
    finally:
        consumer.close()
