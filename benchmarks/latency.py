"""From the insert to the consumer, measured by a consumer, beside Debezium; and what an idle relay costs."""

from __future__ import annotations

import json
import math
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from confluent_kafka import Consumer

from benchmarks import debezium, limits, programs
from benchmarks.quick import QUICK, sized
from benchmarks.servers import fill, fresh_outbox
from benchmarks.table import Figure, Ratio, Row, latency, milliseconds, p99
from outbox_pipelines.settings import Settings

_SECONDS: Final = sized(15.0, 3.0)
_WARM_SECONDS: Final = sized(4.0, 1.5)
_IDLE_SECONDS: Final = sized(15.0, 3.0)
# Events a second, and how many clients write them. At the lower one, seconds have too few for a p99.
RATES: Final = sized(((100, 1), (1000, 2)), ((1000, 2),))
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
    commits: list[float]
    """Measured just before, as trips, in seconds."""
    trips: list[float]
    """To the broker and back."""

    @property
    def limits(self) -> list[float]:
        """No event takes less: a commit, and a round trip to the broker."""
        return [commit + trip for commit, trip in zip(self.commits, self.trips, strict=True)]


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    found: list[Latency] = []
    resting: dict[str, float] = {}
    for name in ("relay", "relay, exactly_once", DEBEZIUM):
        with fresh_outbox(servers) as settings, running(settings, name) as pid:
            warm(settings)
            found += [at_rate(settings, name, rate, clients) for rate, clients in RATES]
            if name != "relay, exactly_once":
                resting[name] = idle(pid)
    return [*rows(found), *idle_rows(resting)]


def rows(found: list[Latency]) -> list[Row]:
    """Return a row for each, with its ratios to Debezium at the same rate and to the limit; and the limit."""
    debezium = {each.rate: each for each in found if each.name == DEBEZIUM}
    alone = (
        ("a commit", [commit for each in found for commit in each.commits]),
        ("a round trip to the broker", [trip for each in found for trip in each.trips]),
        ("both", [limit for each in found for limit in each.limits]),
    )
    return [
        *(_row(each, debezium[each.rate]) for each in found),
        *(Row(f"limit of a latency: {name}", latency(seconds)) for name, seconds in alone),
    ]


def _row(each: Latency, debezium: Latency) -> Row:
    ratios = [
        Ratio(each.p50 / median(each.limits), "the limit", "p50"),
        Ratio(each.p99 / p99(each.limits), "the limit's", "p99"),
    ]
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
    fill(settings, sized(400_000, 40_000))
    with programs.running(settings, "benchmarks.load", settings.dsn, 2, 1000):
        _await_news(settings)
        if not QUICK:
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
    commits, trips = limits.write_and_send(settings)
    with programs.running(settings, "benchmarks.load", settings.dsn, clients, rate):
        found = listen(settings)
    return Latency(name, rate, median(found), p99(found), commits, trips)


def idle(pid: int) -> float:
    """Return the share of a core that a process uses while nothing is written."""
    time.sleep(sized(3.0, 1.0))
    before = programs.cpu_seconds(pid)
    time.sleep(_IDLE_SECONDS)
    return (programs.cpu_seconds(pid) - before) / _IDLE_SECONDS


def idle_rows(shares: Mapping[str, float]) -> list[Row]:
    """Return a row for each, with its ratio to Debezium."""
    return [
        Row(
            f"idle: {name}",
            (Figure(share * 100, "% of a core"),),
            () if name == DEBEZIUM else (Ratio(share / shares[DEBEZIUM], "Debezium"),),
            "" if name == DEBEZIUM else "≤ 2 %",
        )
        for name, share in shares.items()
    ]


def _await_news(settings: Settings) -> None:
    """Until what is written now arrives: the backlog is published."""
    deadline = time.monotonic() + 120
    while min(listen(settings, warm=sized(2.0, 1.0), seconds=1), default=math.inf) > 1:
        assert time.monotonic() < deadline, "nothing is published"


def listen(settings: Settings, *, warm: float = _WARM_SECONDS, seconds: float = _SECONDS) -> list[float]:
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
