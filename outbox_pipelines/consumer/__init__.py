"""The idempotent consumer: an event's handler and the note that it was handled are one transaction.

    from outbox_pipelines.consumer import Consumer, Event

    consumer = Consumer(
        source="billing", topics=["order-events"], kafka={"bootstrap.servers": "broker:9092"}, dsn="…"
    )

    @consumer.on("order.placed")
    def placed(event: Event, connection: psycopg.Connection) -> None:
        connection.execute("INSERT INTO invoices …", [event.aggregate_id])

    consumer.run()

Invariants:
- Needs Kafka's client and psycopg (the extra `consumer`), and nothing of the relay's settings or commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_pipelines.consumer.administration import Pruned, migrate, prune
    from outbox_pipelines.consumer.cache import RedisCache
    from outbox_pipelines.consumer.consumer import AsyncConsumer, Consumer
    from outbox_pipelines.consumer.dedupe_table import DedupeTable
    from outbox_pipelines.consumer.errors import ConsumerError, OutageError, RefusedError
    from outbox_pipelines.consumer.event_reading import Event, Replay
    from outbox_pipelines.consumer.figures import Counts

_PLACES = {
    "AsyncConsumer": "consumer",
    "Consumer": "consumer",
    "ConsumerError": "errors",
    "Counts": "figures",
    "DedupeTable": "dedupe_table",
    "Event": "event_reading",
    "OutageError": "errors",
    "RefusedError": "errors",
    "Pruned": "administration",
    "RedisCache": "cache",
    "Replay": "event_reading",
    "migrate": "administration",
    "prune": "administration",
}
__all__ = [
    "AsyncConsumer",
    "Consumer",
    "ConsumerError",
    "Counts",
    "DedupeTable",
    "Event",
    "OutageError",
    "Pruned",
    "RedisCache",
    "RefusedError",
    "Replay",
    "migrate",
    "prune",
]


def __getattr__(name: str) -> Any:
    # Late, because `outbox` loads this package for each of its commands.
    from importlib import import_module

    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
