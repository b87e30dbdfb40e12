"""Many outboxes in one process: what they cost while they are idle, and how soon a rare event is in Kafka.

With FLEET=N: so many outboxes instead of 100, each in a database of its own. As a program:
``python -m benchmarks.fleet RATE SECONDS DSN …`` writes RATE events a second into each outbox.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fill
from benchmarks.table import Figure, Row, latency
from outbox_pipelines.database import schema
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit

_SECONDS: Final = sized(20.0, 5.0)
_ADOPT: Final = """
UPDATE outbox_shards SET done = pg_current_snapshot(),
    database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
_SESSIONS: Final = """
SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox relay%%' AND datname LIKE %s"""


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    number = int(os.environ.get("FLEET", sized("100", "10")))
    with _outboxes(servers, number) as outboxes, _relays(outboxes) as relays:
        _await_all(outboxes)
        time.sleep(5)
        idle = _share(relays.pid)
        memory = _resident(relays.pid)
        sessions, threads = (
            _sessions(servers, outboxes),
            len(list(Path(f"/proc/{relays.pid}/task").iterdir())),
        )
        rare = _latency(outboxes, 1.0)
        busy, *others = outboxes
        fill(busy, sized(400_000, 40_000))
        beside = _latency(others, 1.0)
    what = f"{number} outboxes in one process"
    return [
        Row(f"{what}, idle", (Figure(idle * 100, "% of a core"),), goal="≤ 25 %"),
        Row(f"{what}: memory", (Figure(memory, "MB"),), goal="≤ 600 MB"),
        Row(f"{what}: its parts", (Figure(sessions, "sessions"), Figure(threads, "threads"))),
        Row(f"{what}: insert → consumer at 1/s in each", latency(rare), goal="p99 ≤ 60 ms"),
        Row(f"{what}: the same beside a backlog of one", latency(beside)),
    ]


@contextmanager
def _outboxes(servers: Settings, number: int) -> Iterator[list[Settings]]:
    run = uuid.uuid4().hex[:8]
    names = [f"bench_{run}_{n}" for n in range(number)]
    admin = AdminClient({"bootstrap.servers": servers.kafka})
    with psycopg.connect(servers.dsn.reveal(), autocommit=True) as connection:
        found: list[Settings] = []
        try:
            for name in names:
                template = b"" if not found else f"TEMPLATE {names[0]}".encode()
                connection.execute(b"CREATE DATABASE %b %b" % (name.encode(), template))
                dsn = psycopg.conninfo.make_conninfo(servers.dsn.reveal(), dbname=name)
                values = {"name": name, "dsn": dsn, "topic": name + "-{aggregate_type}"}
                settings = servers.model_copy(update=values)
                if not found:
                    schema.migrate(settings)
                else:
                    with psycopg.connect(dsn) as copied:
                        copied.execute(_ADOPT)
                found.append(settings)
            made = admin.create_topics([NewTopic(f"{name}-order", 1, 1) for name in names])
            for topic in made.values():
                topic.result(60)
            yield found
        finally:
            for name in names:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
            for topic in admin.delete_topics([f"{name}-order" for name in names]).values():
                topic.result(60)


@contextmanager
def _relays(outboxes: list[Settings]) -> Iterator[subprocess.Popen[bytes]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outbox-bench-")))
        file = folder / "outbox.toml"
        lines = ["[outbox]", f'kafka = "{outboxes[0].kafka}"']
        secrets = {f"DSN_OF_{settings.name}": settings.dsn.reveal() for settings in outboxes}
        for settings in outboxes:
            lines += [f"[outboxes.{settings.name}]", f'dsn = {{ env = "DSN_OF_{settings.name}" }}']
            lines += [f'topics.topic = "{settings.topic}"']
        file.write_text("\n".join(lines))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "outbox_pipelines", "relay", "--all"],
            env=environment | secrets | {"OUTBOX_CONFIG": str(file)},
            stderr=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def _await_all(outboxes: list[Settings]) -> None:
    deadline = time.monotonic() + 180
    for settings in outboxes:
        with psycopg.connect(settings.dsn.reveal(), autocommit=True) as connection:
            while connection.execute("SELECT owner FROM outbox_shards").fetchone() == (None,):
                assert time.monotonic() < deadline, f"{settings.name} is not relayed"
                time.sleep(0.1)


def _share(pid: int) -> float:
    before, begun = programs.cpu_seconds(pid), time.monotonic()
    time.sleep(_SECONDS)
    return (programs.cpu_seconds(pid) - before) / (time.monotonic() - begun)


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _sessions(servers: Settings, outboxes: list[Settings]) -> int:
    with psycopg.connect(servers.dsn.reveal()) as connection:
        like = outboxes[0].name.rpartition("_")[0] + "%"
        row = connection.execute(_SESSIONS, [like]).fetchone()
    return 0 if row is None else int(row[0])


def _latency(outboxes: list[Settings], rate: float) -> list[float]:
    consumer = Consumer(
        {
            "bootstrap.servers": outboxes[0].kafka,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "latest",
            "fetch.wait.max.ms": 100,
        }
    )
    consumer.subscribe([settings.topic.format(aggregate_type="order") for settings in outboxes])
    found: list[float] = []
    dsns = [settings.dsn.reveal() for settings in outboxes]
    command = [sys.executable, "-m", "benchmarks.fleet", str(rate), str(_SECONDS + 10), *dsns]
    with subprocess.Popen(command) as writer:
        warm_until = time.monotonic() + 8
        while writer.poll() is None:
            message = consumer.poll(0.1)
            if message is None or message.error() or time.monotonic() < warm_until:
                continue
            at = json.loads(message.value() or b"").get("at")
            if at is not None:
                found.append(time.time() - at)
    consumer.close()
    return found


def _write(rate: float, seconds: float, dsns: list[str]) -> None:
    """Each outbox in turn, from one thread, so that the writers cost little."""
    connections = [psycopg.connect(dsn) for dsn in dsns]
    pause, begun = 1 / rate / len(dsns), time.monotonic()
    n = 0
    while time.monotonic() - begun < seconds:
        connection = connections[n % len(connections)]
        emit(connection, "order", str(n % 1000), "order.placed", {"at": time.time(), "n": n})
        connection.commit()
        n += 1
        threading.Event().wait(max(0.0, begun + n * pause - time.monotonic()))


if __name__ == "__main__":
    _write(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
