"""A consumer that hangs at event 1.

Usage: python -m tests.consumer.hanger DSN KAFKA TOPIC python|database|caught
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import psycopg

from outbox_pipelines.consumer import Event
from tests.consumer.place import Place, effect


def main(dsn: str, kafka: str, topic: str, how: str) -> None:
    def handler(event: Event, connection: psycopg.Connection[Any]) -> None:
        effect(event, connection)
        if event.payload["n"] == 1 and how == "python":
            time.sleep(600)
        elif event.payload["n"] == 1 and how == "caught":
            with contextlib.suppress(Exception):
                time.sleep(600)
        elif event.payload["n"] == 1:
            connection.execute("SELECT pg_sleep(600)")

    consumer = Place(dsn, kafka, topic).bare(max_attempts=2, retry_seconds=0.1, handler_seconds=0.5)
    consumer.on("order.placed")(handler)
    consumer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
