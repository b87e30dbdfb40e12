"""What the relay costs those who write: the latency of commits with no relay, with it, and with NOTIFY.

NOTIFY in each transaction is how relays elsewhere are woken; here it is measured, not used.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Ratio, Row, milliseconds, p99
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit

_CLIENTS: Final = 4
_RATE: Final = 1000.0
_SECONDS: Final = sized(5.0, 1.5)
_ROUNDS: Final = sized(5, 2)
_WAYS: Final = ("no relay", "relay", "relay, and NOTIFY in each transaction")


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    p99s: dict[str, list[float]] = {way: [] for way in _WAYS}
    with fresh_outbox(servers) as settings:
        for _ in range(_ROUNDS):
            for way in _WAYS:
                with _relay(settings, way):
                    seconds = _write(settings, notify="NOTIFY" in way)
                found[way].append(median(seconds))
                p99s[way].append(p99(seconds))
    alone = median(found[_WAYS[0]])
    return [
        Row(
            f"commit of a writer at {_RATE:,.0f}/s, {way}",
            (milliseconds(median(found[way]), "p50"), milliseconds(median(p99s[way]), "p99")),
            (Ratio(median(found[way]) / alone, "without"),),
        )
        for way in _WAYS
    ]


def _relay(settings: Settings, way: str) -> AbstractContextManager[object]:
    return nullcontext() if way == "no relay" else programs.running(settings, "outbox_pipelines", "relay")


def _write(settings: Settings, *, notify: bool) -> list[float]:
    """Seconds of each COMMIT of all clients."""
    found: list[float] = []
    until = time.monotonic() + 1 + _SECONDS
    clients = [
        threading.Thread(target=_client, args=(settings.dsn, client, notify, until, found))
        for client in range(_CLIENTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return found


def _client(dsn: str, client: int, notify: bool, until: float, found: list[float]) -> None:
    with psycopg.connect(dsn) as connection, _listener(dsn, notify and client == 0):
        next_at = time.monotonic()
        n = 0
        while (now := time.monotonic()) < until:
            next_at += _CLIENTS / _RATE
            time.sleep(max(0.0, next_at - now))
            n += 1
            emit(connection, "order", f"{client}-{n % 1000}", "order.placed", {"n": n})
            if notify:
                connection.execute("NOTIFY outbox")
            started = time.perf_counter()
            connection.commit()
            # The first second warms the connections up, and the relay.
            if now > until - _SECONDS:
                found.append(time.perf_counter() - started)


def _listener(dsn: str, needed: bool) -> AbstractContextManager[Any]:
    """Listen for the notifications, as a relay would."""
    if not needed:
        return nullcontext()
    connection = psycopg.connect(dsn, autocommit=True)
    connection.execute("LISTEN outbox")
    return connection
