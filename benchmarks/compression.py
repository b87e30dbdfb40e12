"""What each compression of Kafka's messages costs and saves, in Kafka's client: CPU and bytes on the wire.

Against librdkafka's own mock of a broker, in this process: neither the database nor a broker is measured.
"""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any
from uuid import uuid4

from confluent_kafka import Producer

from benchmarks.table import Row
from outbox_pipelines.settings import Settings

_EVENTS = 20_000
_ROUNDS = 3
Event = tuple[bytes, bytes, dict[str, str | bytes | None]]
_KINDS = ("none", "gzip", "snappy", "lz4", "zstd")


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    events = [_event(number) for number in range(_EVENTS)]
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    # In turn, so that a drift of the machine falls on all alike.
    for _ in range(_ROUNDS):
        for kind in _KINDS:
            found[kind].append(_publish(kind, events))
    return [
        Row(
            f"Kafka's client, {_EVENTS:,} events, compression {kind}",
            f"{median(cpu for cpu, _ in found[kind]):.2f} s of CPU",
            f"{median(sent for _, sent in found[kind]) / _EVENTS:.0f} B an event",
        )
        for kind in _KINDS
    ]


def _event(number: int) -> Event:
    """Key, value and headers, as the relay makes them."""
    payload = {
        "customer": number * 7919 % 50_000,
        "items": [{"sku": f"A-{number * n % 9973}", "price": n * 1.25, "count": n} for n in range(1, 4)],
        "state": "placed",
        "note": "leave it at the door",
    }
    headers: dict[str, str | bytes | None] = {
        "id": str(uuid4()).encode(),
        "event-type": b"order.placed",
        "aggregate-type": b"order",
    }
    return str(number % 20_000).encode(), json.dumps(payload).encode(), headers


def _publish(kind: str, events: list[Event]) -> tuple[float, float]:
    """Seconds of CPU, and bytes sent."""
    sent = 0

    def count(text: str) -> None:
        nonlocal sent
        sent = sum(broker["txbytes"] for broker in json.loads(text)["brokers"].values())

    config: dict[str, Any] = {
        "test.mock.num.brokers": 1,
        "compression.type": kind,
        "linger.ms": 5,
        "batch.num.messages": 10_000,
        "queue.buffering.max.messages": 2 * _EVENTS,
        "enable.idempotence": True,
        "statistics.interval.ms": 100,
        "log_level": 4,
        "stats_cb": count,
    }
    producer = Producer(config)
    began = time.process_time()
    for key, value, headers in events:
        producer.produce("events", value, key, headers=headers)
    producer.flush(60)
    cpu = time.process_time() - began
    until, last = time.monotonic() + 1, sent
    while time.monotonic() < until or sent != last:
        last = sent
        producer.poll(0.2)
    return cpu, sent
