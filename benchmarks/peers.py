"""The relay in all its forms beside the real Debezium, the textbook publisher, and the two limits.

Invariants:
- The same rows for all, from the same function; the same server and broker; taken in turn.
- Debezium sleeps (SIGSTOP) while rows are written for it and while others are measured, and has passed all
  older WAL before: it is measured on its rows alone.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import psycopg
from confluent_kafka import Consumer

from benchmarks import debezium, limits, programs, textbook
from benchmarks.debezium import Debezium
from benchmarks.quick import QUICK, sized
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Figure, Ratio, Row, memory, paired, rate
from outbox_pipelines.settings import Settings

_EVENTS: Final = sized(400_000, 40_000)
_ROUNDS: Final = sized(3, 1)
_TEXTBOOK_EVENTS: Final = sized(20_000, 2_000)

# As its documentation and those who measured it advise for throughput.
TUNED: Final[dict[str, object]] = {
    "max.batch.size": 10_000,
    "max.queue.size": 40_000,
    "poll.interval.ms": 5,
    "producer.override.linger.ms": 5,
    "producer.override.batch.size": 1_000_000,
    "producer.override.compression.type": "lz4",
}
_MAPPING: Final = """
name = "textbook_outbox"

[columns]
seq = "id"
published_at = "published_at"
retry_count = "retry_count"
"""
_CPU: Final = "CPU-s per 100,000"
_AGAIN: Final = "UPDATE textbook_outbox SET published_at = NULL"


@dataclass
class Measured:
    """What one way of publishing took, a value a round."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Seconds per 100,000 events, of the process."""
    machine: list[float] = field(default_factory=list)
    """The same, of everything on the machine."""
    memory: list[float] = field(default_factory=list)

    def add(self, events: float, seconds: float, cpu: float, machine: float, memory: float) -> None:
        self.rates.append(events / seconds)
        self.cpu.append(cpu / events * 1e5)
        self.machine.append(machine / events * 1e5)
        self.memory.append(memory)

    @property
    def rate(self) -> float:
        return median(self.rates)


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        if not QUICK:
            with asleep(servers, Path(folder) / "default", {}) as theirs:
                for jvm in ("just started", "warm"):
                    theirs.drain(found.setdefault(f"Debezium, default settings, JVM {jvm}", Measured()))
        with (
            asleep(servers, Path(folder) / "tuned", TUNED) as theirs,
            fresh_outbox(servers) as settings,
            _table(servers, Path(folder)) as table,
        ):
            fill(settings, _EVENTS)
            theirs.drain(found.setdefault("Debezium, tuned, JVM just started", Measured()))
            for _ in range(_ROUNDS):
                _limit(settings, "read", found.setdefault("limit: reading alone", Measured()))
                _limit(settings, "copy", found.setdefault("limit: COPY in binary to nothing", Measured()))
                _limit(settings, "produce", found.setdefault("limit: librdkafka alone", Measured()))
                for delivery in ("at_least_once", "exactly_once"):
                    rewind(settings)
                    chosen = settings.model_copy(update={"delivery": delivery})
                    _relay(chosen, found.setdefault(f"relay, {delivery}", Measured()))
                theirs.drain(found.setdefault("Debezium, tuned, JVM warm", Measured()))
                _mark_as_unpublished(table)
                _relay(table, found.setdefault("relay on a textbook table", Measured()))
                _textbook(settings, found.setdefault("textbook publisher", Measured()))
    return _rows(found)


def _rows(found: dict[str, Measured]) -> list[Row]:
    ours = found["relay, at_least_once"].rates
    theirs, alone = found["Debezium, tuned, JVM warm"], found["limit: librdkafka alone"]
    peers = {
        "relay, at_least_once": {
            "Debezium at its best": "Debezium, tuned, JVM warm",
            "the textbook publisher": "textbook publisher",
            "librdkafka alone": "limit: librdkafka alone",
            "COPY in binary": "limit: COPY in binary to nothing",
        },
        "relay, exactly_once": {
            "at_least_once": "relay, at_least_once",
            "Debezium at its best": "Debezium, tuned, JVM warm",
            "librdkafka alone": "limit: librdkafka alone",
        },
    }
    goals = {"relay, at_least_once": "≥ 2.5 ×, ≥ 0.70 ×", "relay, exactly_once": "≥ 0.85 ×"}
    reading = found["limit: reading alone"]
    least = [one + other for one, other in zip(reading.cpu, alone.cpu, strict=True)]
    rows = [Row("limit: reading and producing alone", (Figure(median(least), _CPU),))]
    for name, measured in found.items():
        figures = [rate(measured.rates)]
        if any(measured.cpu):
            figures.append(Figure(median(measured.cpu), _CPU))
        if any(measured.memory):
            figures += [
                Figure(median(measured.machine), "CPU-s of the machine"),
                memory(measured.memory),
            ]
        ratios = [
            Ratio(paired(measured.rates, found[other].rates), to) for to, other in peers.get(name, {}).items()
        ]
        if name in peers:
            ratios += [
                Ratio(paired(measured.cpu, theirs.cpu), "Debezium", "CPU"),
                Ratio(paired(measured.cpu, least), "reading and producing alone", "CPU"),
                Ratio(max(measured.memory) / max(theirs.memory), "Debezium", "memory"),
            ]
        if name not in peers and "limit" not in name:
            ratios = [Ratio(measured.rate / median(ours), "the relay")]
        rows.append(Row(name, tuple(figures), tuple(ratios), goals.get(name, "")))
    return rows


def _relay(settings: Settings, measured: Measured) -> None:
    before = _machine()
    drain = programs.drain(settings)
    assert drain.events == _EVENTS, drain
    measured.add(drain.events, drain.seconds, drain.cpu, _machine() - before, drain.peak)


def _limit(settings: Settings, which: str, measured: Measured) -> None:
    topic = settings.topic.format(aggregate_type="order")
    found = limits.Limit(*programs.run(settings, "limits", which, settings.dsn, settings.kafka, topic))
    assert found.events == _EVENTS, found
    measured.add(found.events, found.seconds, found.cpu, 0.0, 0.0)


def _textbook(settings: Settings, measured: Measured) -> None:
    topic = settings.topic.format(aggregate_type="order")
    arguments = (settings.dsn, settings.kafka, topic, _TEXTBOOK_EVENTS)
    events, seconds = programs.run(settings, "textbook", *arguments)
    measured.add(events, seconds, 0.0, 0.0, 0.0)


@contextmanager
def _table(servers: Settings, folder: Path) -> Iterator[Settings]:
    """Settings for a textbook table with as many events."""
    with fresh_outbox(servers) as settings:
        with psycopg.connect(settings.dsn) as connection:
            connection.execute(textbook.TABLE.encode())
            connection.execute(textbook.FILL.format(events=_EVENTS).encode())
        yield settings.model_copy(update={"table": tomllib.loads(_MAPPING)})


def _mark_as_unpublished(settings: Settings) -> None:
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute(_AGAIN)
        # Rewritten, as a table is whose rows were never touched.
        connection.execute("VACUUM (FULL, ANALYZE) textbook_outbox")
        connection.execute("CHECKPOINT")


class Sleeper:
    """A Debezium that sleeps but for its measurements."""

    def __init__(self, server: Debezium, settings: Settings) -> None:
        self._server = server
        self._settings = settings
        self._topic = settings.topic.format(aggregate_type="order")
        self._consumer = Consumer({"bootstrap.servers": settings.kafka, "group.id": "outbox-bench"})

    def drain(self, measured: Measured) -> None:
        """Rows are written while it sleeps; then it is measured from its waking to the last message."""
        self.wake()
        # What is older in the WAL, of this and other databases, is passed first.
        size = debezium.size(self._consumer, self._topic)
        fill(self._settings, 1)
        self._wait_for(size + 1)
        os.kill(self._server.pid, signal.SIGSTOP)
        fill(self._settings, _EVENTS)
        before, machine = self._cpu(), _machine()
        started = time.perf_counter()
        self.wake()
        self._wait_for(size + 1 + _EVENTS)
        seconds = time.perf_counter() - started
        measured.add(_EVENTS, seconds, self._cpu() - before, _machine() - machine, self._peak())
        os.kill(self._server.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def close(self) -> None:
        self.wake()
        self._consumer.close()

    def _wait_for(self, size: int) -> None:
        deadline = time.monotonic() + 300
        while debezium.size(self._consumer, self._topic) < size:
            assert time.monotonic() < deadline, self._server.last_words()
            time.sleep(0.02)

    def _cpu(self) -> float:
        return programs.cpu_seconds(self._server.pid)

    def _peak(self) -> float:
        """Resident memory of the JVM, in MB."""
        status = Path(f"/proc/{self._server.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextmanager
def asleep(servers: Settings, folder: Path, tuning: dict[str, object]) -> Iterator[Sleeper]:
    with fresh_outbox(servers) as settings:
        routed = {debezium.ROUTED: settings.topic.format(aggregate_type="${routedByValue}")}
        own = {**tuning, **routed}
        with debezium.running(settings.dsn, settings.kafka, folder, own, heap="2g") as server:
            theirs = Sleeper(server, settings)
            try:
                yield theirs
            finally:
                theirs.close()


def _machine() -> float:
    """Seconds of CPU that everything on this machine has used (Linux)."""
    with open("/proc/stat") as stat:  # noqa: PTH123
        user, nice, system, _idle, _waiting, *interrupts = map(int, stat.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
