"""What an event costs the business transaction that writes it: interleaved, medians."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import psycopg

from benchmarks.servers import fresh_outbox
from benchmarks.table import Row
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit

_ROUNDS = 1500
_BARE = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES (%s, %s, %s, %s::jsonb)"""
_PAYLOAD = {"total": 5, "state": "placed"}


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as settings, psycopg.connect(settings.dsn) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, n int NOT NULL)")
        connection.execute("INSERT INTO orders SELECT i, 0 FROM generate_series(0, 999) i")
        connection.commit()

        def business(n: int) -> None:
            connection.execute("UPDATE orders SET n = n + 1 WHERE id = %s", [n % 1000])

        def bare(n: int) -> None:
            connection.execute(_BARE, ["order", str(n % 1000), "order.placed", json.dumps(_PAYLOAD)])

        def helper(n: int) -> None:
            emit(connection, "order", n % 1000, "order.placed", _PAYLOAD)

        def with_bare(n: int) -> None:
            business(n)
            bare(n)

        def with_helper(n: int) -> None:
            business(n)
            helper(n)

        ways = {"without": business, "bare": with_bare, "emit": with_helper}
        whole = _interleaved(connection, ways, commit=True)
        alone = _interleaved(connection, {"bare": bare, "emit": helper}, commit=False)
    return [
        Row("transaction without an event", f"{whole['without'] * 1e6:.0f} µs"),
        Row(
            "  with a bare INSERT of an event",
            f"{whole['bare'] * 1e6:.0f} µs",
            f"{whole['bare'] / whole['without']:.2f} × without",
        ),
        Row(
            "  with emit",
            f"{whole['emit'] * 1e6:.0f} µs",
            f"{whole['emit'] / whole['bare']:.2f} × the bare INSERT's",
        ),
        Row(
            "emit alone, no commit",
            f"{alone['emit'] * 1e6:.0f} µs",
            f"{alone['emit'] / alone['bare']:.2f} × a bare INSERT",
        ),
    ]


def _interleaved(
    connection: psycopg.Connection[Any], ways: Mapping[str, Callable[[int], object]], *, commit: bool
) -> dict[str, float]:
    """Median seconds of each way; in turn, so that a drift falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(_ROUNDS):
        for name, way in ways.items():
            started = time.perf_counter()
            way(n)
            if commit:
                connection.commit()
            times[name].append(time.perf_counter() - started)
            connection.commit()
    # The first ones prepare statements.
    return {name: median(values[100:]) for name, values in times.items()}
