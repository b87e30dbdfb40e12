"""An event as written to the outbox."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from uuid import UUID

from outbox_pipelines.writer.content import Row


class WrittenEvent(NamedTuple):
    """An event in the outbox; the members after `seq` are the arguments of `emit`."""

    id: UUID
    seq: int
    """Its position in the order of events."""
    aggregate_type: str
    aggregate_id: str
    """The id as text: 42 is "42"."""
    event_type: str
    payload: Any
    """As JSON: a Decimal, a UUID, a date are text, a tuple is a list."""
    headers: dict[str, Any] | None
    idempotency_key: str | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    version: int | None


def written(drawn: UUID, seq: int, row: Row) -> WrittenEvent:
    """Return an event from its columns."""
    headers = None if row.headers is None else json.loads(row.headers)
    columns: tuple[Any, ...] = row._replace(payload=json.loads(row.payload), headers=headers)
    return WrittenEvent(drawn, seq, *columns)
