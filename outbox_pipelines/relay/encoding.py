"""What a consumer sees of an event: key, value and headers.

Invariants:
- Pure: the same event always gives the same message.
- The key is the aggregate's id, so that an aggregate's events share a partition.
- The row's own headers come last and never replace the relay's: consumers deduplicate by `id`.
"""

from __future__ import annotations

import json
from typing import Final

from outbox_pipelines.event import Event

# As confluent-kafka types them; every value here is a str.
Headers = list[tuple[str, str | bytes | None]]

RESERVED: Final = frozenset(
    {
        "id",
        "event-type",
        "aggregate-type",
        "idempotency-key",
        "correlation-id",
        "causation-id",
        "traceparent",
        "version",
    }
)


def headers(event: Event) -> Headers:
    """The headers: three that are always there, then what the row has of metadata, then its own."""
    always: Headers = [
        ("id", event.id),
        ("event-type", event.event_type),
        ("aggregate-type", event.aggregate_type),
    ]
    if event.metadata is None:
        return always
    metadata = json.loads(event.metadata)
    own = metadata.pop("headers")
    return [
        *always,
        *((name, _text(value)) for name, value in metadata.items()),
        *((name, _text(value)) for name, value in own.items() if name not in RESERVED),
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
