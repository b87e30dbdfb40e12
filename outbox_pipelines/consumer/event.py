"""An event as a handler gets it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final
from uuid import UUID

ENVELOPE: Final = frozenset(
    ("event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "timestamp")
)
# For ids that are no UUIDs: the same text always gives the same one.
NAMESPACE: Final = UUID("5d1b7c1e-3a54-5c0e-9b61-0d2f6c1f8a77")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One message of a topic of events."""

    id: str
    type: str
    """Such as ``order.placed``; empty where neither headers nor value tell."""
    aggregate_type: str | None
    aggregate_id: str | None
    """Such as the order's number; the message's key where nothing else tells."""
    value: bytes | None
    """As it was in Kafka; None: a tombstone."""
    headers: Mapping[str, str | None]
    """All of them, by their names in Kafka."""
    idempotency_key: str | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    version: int | None
    topic: str
    partition: int
    offset: int
    timestamp: datetime
    """When it came to Kafka, UTC."""

    @cached_property
    def payload(self) -> Any:
        """The body, parsed when it is first asked for and taken out of an envelope or CloudEvent.

        None for a tombstone. In the shape `flat` it has the members that the relay adds.

        Raises:
            ValueError: the value is not JSON, or JSON that is nested too deeply for Python.
        """
        if self.value is None:
            return None
        try:
            body = json.loads(self.value)
        except RecursionError:
            raise ValueError("the value is nested too deeply") from None
        if is_cloudevent(body) and body["id"] == self.id:
            return body.get("data")
        if is_envelope(body) and body["event_id"] == self.id:
            return body["payload"]
        return body

    @cached_property
    def uuid(self) -> UUID:
        """The id as `processed_events` has it: one that is no UUID becomes one (version 5)."""
        try:
            return UUID(self.id)
        except ValueError:
            return uuid.uuid5(NAMESPACE, self.id)

    def identity(self, *, by_key: bool) -> UUID:
        """What tells the event from others: its idempotency key where it has one and that is asked for."""
        if by_key and self.idempotency_key is not None:
            return uuid.uuid5(NAMESPACE, f"idempotency-key {self.idempotency_key}")
        return self.uuid

    def __str__(self) -> str:
        place = f"{self.topic}, partition {self.partition}, offset {self.offset}"
        return f"{self.type or 'event'} {self.id} ({place})"


def is_envelope(body: object) -> bool:
    return isinstance(body, dict) and body.keys() == ENVELOPE


def is_cloudevent(body: object) -> bool:
    return isinstance(body, dict) and {"specversion", "id", "type", "source"} <= body.keys()
