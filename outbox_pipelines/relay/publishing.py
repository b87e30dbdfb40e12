"""The producer and the publisher of a shard, by the delivery mode."""

from __future__ import annotations

import time
from uuid import uuid4

from outbox_pipelines.relay.core.publisher import Publisher
from outbox_pipelines.relay.core.transactions import TransactionalPublisher
from outbox_pipelines.relay.kafka.producer import IdempotentProducer
from outbox_pipelines.relay.run import Run
from outbox_pipelines.relay.shard import Shard
from outbox_pipelines.relay.shared import SharedBlockedAggregates
from outbox_pipelines.relay.transactional_producer import FencingProducer, recover
from outbox_pipelines.relay.worker import Worker
from outbox_pipelines.settings import Settings


def make_worker(
    settings: Settings,
    shard: Shard,
    producer: IdempotentProducer,
    blocked: SharedBlockedAggregates,
    run: Run,
) -> Worker:
    """Return a worker for a shard that has been taken."""
    uses_transactions = settings.delivery == "exactly_once" or shard.tick_id is not None
    if uses_transactions and (fencing := _recovered(settings, shard)) is not None:
        producer.close()
        producer = fencing
    return Worker(settings, shard, producer, make_publisher(settings, shard, producer, blocked), blocked, run)


def make_publisher(
    settings: Settings, shard: Shard, producer: IdempotentProducer, blocked: SharedBlockedAggregates
) -> Publisher:
    """Return the publisher for this producer: with transactions if it fences."""
    patience, clock = settings.breaker_seconds, time.monotonic
    if isinstance(producer, FencingProducer):
        tick = shard.position, shard.tick_id
        return TransactionalPublisher(
            *(producer, blocked, *tick),
            patience=patience,
            clock=clock,
            new_id=lambda: str(uuid4()),
            timeout=settings.transaction_seconds,
        )
    return Publisher(producer, blocked, patience=patience, clock=clock)


def _recovered(settings: Settings, shard: Shard) -> FencingProducer | None:
    """A producer for exactly_once; None in at_least_once, after believing what the other mode has left."""
    first = recover(settings, shard, lambda error: None)
    if settings.delivery == "exactly_once":
        return FencingProducer(settings, shard, first)
    shard.forget_tick()
    return None
