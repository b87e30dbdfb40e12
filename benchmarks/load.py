"""Clients that write one event a transaction, as fast as they can, until they are ended.

As a program: ``python -m benchmarks.load DSN CLIENTS [EVENTS_PER_SECOND]``.
"""

from __future__ import annotations

import sys
import threading
import time

import psycopg

from outbox_pipelines.writer import emit


def write(dsn: str, client: int, rate: float | None) -> None:
    """Write without end; the payload carries the time just before the commit, in seconds."""
    with psycopg.connect(dsn) as connection:
        next_at = time.monotonic()
        n = 0
        while True:
            if rate is not None:
                next_at += 1 / rate
                time.sleep(max(0.0, next_at - time.monotonic()))
            n += 1
            emit(connection, "order", f"{client}-{n % 1000}", "order.placed", {"at": time.time(), "n": n})
            connection.commit()


if __name__ == "__main__":
    dsn, clients = sys.argv[1], int(sys.argv[2])
    rate = float(sys.argv[3]) / clients if len(sys.argv) > 3 else None
    threads = [
        threading.Thread(target=write, args=(dsn, client, rate), daemon=True) for client in range(clients)
    ]
    for thread in threads:
        thread.start()
    threading.Event().wait()
