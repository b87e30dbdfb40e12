"""What writers feel when their table becomes a view of the append-only outbox, and a table again.

Invariants:
- Four clients insert and commit all the time, and a report reads the table in transactions of two seconds.
- A wait is the longest INSERT with its COMMIT, as the client sees it, while the names change.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import psycopg

from benchmarks.servers import fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.existing.adopt import steps
from outbox_pipelines.settings import Settings

_WRITERS = 4
_REPORT_SECONDS = 2.0
_CONTROL_SECONDS = 20.0
_ROUNDS = 10
_INSERTS = 4_000
_TABLE = """
CREATE SCHEMA app;
CREATE TABLE app.outbox (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type varchar(255) NOT NULL,
    aggregate_id varchar(255) NOT NULL, event_type varchar(255) NOT NULL, payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(), published_at timestamptz);
CREATE INDEX ON app.outbox (created_at) WHERE published_at IS NULL"""
_MAPPING = """
name = "app.outbox"
order = "created_at"

[columns]
published_at = "published_at"
"""
_INSERT = (
    "INSERT INTO app.outbox (aggregate_type, aggregate_id, event_type, payload) "
    "VALUES ('order', %s, 'order.placed', %s) RETURNING id"
)
_PAYLOAD = f'{{"number": 5, "customer": "{"c" * 32}", "state": "placed", "note": "{"n" * 64}"}}'
# So that nothing has to be published between two switches.
_PUBLISHED = "UPDATE app.outbox_adopted SET published_at = now() WHERE published_at IS NULL"
_SKIPPED = "UPDATE public.outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL"


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as fresh:
        settings = fresh.model_copy(update={"table": tomllib.loads(_MAPPING)})
        with psycopg.connect(settings.dsn, autocommit=True) as connection:
            connection.execute(_TABLE.encode())
            steps.prepare(settings)
            table = _cost(connection)
            with _writing(settings) as waits:
                time.sleep(_CONTROL_SECONDS)
            control = max(waits)
            lasted, attempts = [], []
            with _writing(settings) as waits:
                for _ in range(_ROUNDS):
                    for switched, seconds in (_switch(settings, connection), _back(settings, connection)):
                        lasted.append(seconds)
                        attempts.append(switched.attempts)
            _switch(settings, connection)
            view = _cost(connection)
    return [
        Row("adopt: a writer's longest INSERT, no switch", f"{control * 1000:,.0f} ms"),
        Row(
            f"  {_ROUNDS} switches and ways back beside a report",
            f"{max(waits) * 1000:,.0f} ms; {max(attempts)} attempts, {max(lasted):,.1f} s at most",
            "",
            "50 ms more",
        ),
        Row("  a row into the table, without the sync", f"{table * 1e6:,.0f} µs"),
        Row("  into the view", f"{view * 1e6:,.0f} µs", f"{view / table:.1f}"),
    ]


def _switch(settings: Settings, connection: psycopg.Connection[Any]) -> tuple[steps.Switched, float]:
    started = time.monotonic()
    switched = steps.switch(settings, [], seconds=120, say=_silent)
    seconds = time.monotonic() - started
    connection.execute(_PUBLISHED)
    steps.drain(settings, seconds=60, say=_silent)
    return switched, seconds


def _back(settings: Settings, connection: psycopg.Connection[Any]) -> tuple[steps.Switched, float]:
    over = threading.Event()

    def skip() -> None:
        with psycopg.connect(settings.dsn, autocommit=True) as other:
            while not over.wait(0.05):
                other.execute(_SKIPPED)

    skipping = threading.Thread(target=skip)
    skipping.start()
    started = time.monotonic()
    try:
        switched = steps.back(settings, seconds=120, say=_silent)
    finally:
        over.set()
        skipping.join()
    return switched, time.monotonic() - started


def _silent(_: str) -> None: ...


def _cost(connection: psycopg.Connection[Any]) -> float:
    """Seconds of an INSERT in a transaction of its own."""
    connection.execute("SET synchronous_commit = off")
    connection.prepare_threshold = 0
    spent = []
    for n in range(_INSERTS):
        started = time.perf_counter()
        connection.execute(_INSERT.encode(), [str(n % 500), _PAYLOAD])
        spent.append(time.perf_counter() - started)
    return median(spent)


@contextmanager
def _writing(settings: Settings) -> Iterator[list[float]]:
    """Writers and a report; the seconds of each INSERT with its COMMIT."""
    over = threading.Event()
    waits: list[float] = []
    threads = [threading.Thread(target=_write, args=(settings.dsn, over, waits)) for _ in range(_WRITERS)]
    threads.append(threading.Thread(target=_report, args=(settings.dsn, over)))
    for thread in threads:
        thread.start()
    try:
        yield waits
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _write(dsn: str, over: threading.Event, waits: list[float]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        n = 0
        while not over.wait(0.002):
            n += 1
            started = time.perf_counter()
            connection.execute(_INSERT.encode(), [str(n % 500), _PAYLOAD])
            waits.append(time.perf_counter() - started)


def _report(dsn: str, over: threading.Event) -> None:
    with psycopg.connect(dsn) as connection:
        while not over.is_set():
            connection.execute("SELECT count(*) FROM (SELECT FROM app.outbox LIMIT 1000) read")
            over.wait(_REPORT_SECONDS)
            connection.rollback()
