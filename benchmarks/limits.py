"""What no relay can exceed here: reading alone, producing alone, a commit and a round trip to the broker.

As a program: ``python -m benchmarks.limits read|copy|produce DSN KAFKA TOPIC`` prints a `Limit`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import psycopg
from confluent_kafka import Producer

from benchmarks import usage
from benchmarks.bones import PIECE, PRODUCER, READ
from benchmarks.quick import sized
from outbox_pipelines.local import postgres
from outbox_pipelines.settings import Settings

_ENDS = "SELECT min(seq), max(seq), max(tableoid)::regclass::text, pg_current_snapshot()::text FROM outbox"

_PROBES: Final = sized(500, 100)
# Of the relay's slot; the end is what was written before.
_PUBLICATION: Final = """
SELECT (SELECT pubname FROM pg_publication), pg_current_wal_insert_lsn()::text
FROM pg_replication_slots WHERE slot_name = %s"""


class Limit(NamedTuple):
    """What one pass over all events took."""

    events: float
    seconds: float
    cpu: float
    """Seconds of CPU of the process."""

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.seconds


def batches(dsn: str) -> Iterator[list[Any]]:
    """All rows, as the relay reads them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(_ENDS).fetchone()
        assert row is not None
        low, high, leaf, now = row
        connection.execute("SET jit = off")
        for last in range(low - 1, high, PIECE):
            with connection.cursor(binary=True) as cursor:
                cursor.execute(READ.format(leaf=leaf).encode(), [last, last + PIECE, now, "1:1:"])
                yield cursor.fetchall()


def read(dsn: str) -> Limit:
    """Reads everything."""
    started, cpu = time.perf_counter(), usage.cpu()
    return _since(started, cpu, sum(map(len, batches(dsn))))


def produce(dsn: str, kafka: str, topic: str) -> Limit:
    """Produces everything out of the memory, with headers and without a callback."""
    rows = [row for batch in batches(dsn) for row in batch]
    producer = Producer({"bootstrap.servers": kafka, **PRODUCER, "queue.buffering.max.messages": len(rows)})
    producer.list_topics(topic, timeout=10)
    started, cpu = time.perf_counter(), usage.cpu()
    for _seq, name, kind, aggregate, event, payload in rows:
        headers = [("id", name), ("event-type", event), ("aggregate-type", kind)]
        producer.produce(topic, payload, aggregate, headers=headers)
    producer.flush()
    return _since(started, cpu, len(rows))


def copy(dsn: str) -> Limit:
    """Copies everything in PostgreSQL's binary format to nothing."""
    with psycopg.connect(dsn, autocommit=True) as connection, connection.cursor() as cursor:
        started, cpu = time.perf_counter(), usage.cpu()
        with cursor.copy("COPY (SELECT * FROM outbox) TO STDOUT (FORMAT binary)") as rows:
            for _ in rows:
                pass
        return _since(started, cpu, cursor.rowcount)


def _since(started: float, cpu: float, events: int) -> Limit:
    return Limit(events, time.perf_counter() - started, usage.cpu() - cpu)


def decode(settings: Settings, slot: str) -> float:
    """Return the seconds in which pg_recvlogical receives what a slot has, as raw bytes, to nothing."""
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        ((publication, end),) = connection.execute(_PUBLICATION, [slot]).fetchall()
    program = postgres.find_programs(settings.local_postgres) / "pg_recvlogical"
    options = ("-o", "proto_version=1", "-o", f"publication_names={publication}", "--endpos", end)
    command = [
        program,
        "-d",
        settings.dsn.reveal(),
        "-S",
        slot,
        "--start",
        "--no-loop",
        "-f",
        "/dev/null",
        *options,
    ]
    started = time.perf_counter()
    subprocess.run(command, check=True, timeout=300, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def write_and_send(settings: Settings) -> tuple[list[float], list[float]]:
    """Return the seconds of commits of one row, and of messages' ways to the broker and back, in turn."""
    topic = settings.topic.format(aggregate_type="order")
    producer = Producer({"bootstrap.servers": settings.kafka, "acks": "all", "linger.ms": 0})
    commits, trips = [], []
    with psycopg.connect(settings.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS committed (n int)")
        for n in range(_PROBES):
            started = time.perf_counter()
            connection.execute("INSERT INTO committed VALUES (%s)", [n])
            commits.append(time.perf_counter() - started)
            started = time.perf_counter()
            producer.produce(topic, b"{}", str(n))
            producer.flush()
            trips.append(time.perf_counter() - started)
    return commits[_PROBES // 10 :], trips[_PROBES // 10 :]


if __name__ == "__main__":
    which, dsn, *place = sys.argv[1:]
    print(*({"read": read, "copy": copy}[which](dsn) if which != "produce" else produce(dsn, *place)))
