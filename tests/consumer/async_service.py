"""An asynchronous consumer in a process of its own. Usage: python -m … DSN KAFKA TOPIC"""

from __future__ import annotations

import asyncio
import sys

from outbox_pipelines.consumer import AsyncConsumer
from tests.consumer.place import Place
from tests.consumer.test_async import effect


def main(dsn: str, kafka: str, topic: str) -> None:
    consumer = Place(dsn, kafka, topic).bare(kind=AsyncConsumer)
    consumer.on("order.placed")(effect)
    print(asyncio.run(consumer.run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
