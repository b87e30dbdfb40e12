"""A consumer that one event kills. Usage: python -m tests.consumer.killer DSN KAFKA TOPIC N [BATCH]"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psycopg

from outbox_pipelines.consumer import Event
from tests.consumer.place import STATIC, Place, effect


def main(dsn: str, kafka: str, topic: str, fatal: str, batch: str = "") -> None:
    def handler(event: Event, connection: psycopg.Connection[Any]) -> None:
        effect(event, connection)
        if event.payload["n"] == int(fatal):
            os.kill(os.getpid(), signal.SIGKILL)

    def each(events: list[Event], connection: psycopg.Connection[Any]) -> None:
        for event in events:
            handler(event, connection)

    consumer = Place(dsn, kafka, topic).bare(kafka=STATIC, max_attempts=2, retry_seconds=0.1)
    if batch:
        consumer.on("order.placed", batch=int(batch))(each)
    else:
        consumer.on("order.placed")(handler)
    consumer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
