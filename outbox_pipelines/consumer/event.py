"""The event that a handler gets."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, cast
from uuid import UUID

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # `Event` alone is `Event[Any]`.
    Payload = TypeVar("Payload", covariant=True, default=Any)
else:
    from typing import TypeVar

    Payload = TypeVar("Payload", covariant=True)

ENVELOPE: Final = frozenset(
    ("event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "timestamp")
)
# For what is no UUID: the same parts always give the same one.
NAMESPACE: Final = UUID("5d1b7c1e-3a54-5c0e-9b61-0d2f6c1f8a77")


@dataclass(frozen=True, kw_only=True)
class Event(Generic[Payload]):
    """One message of a topic of events.

    A handler whose first parameter is annotated with `Event[OrderPlaced]` gets an `OrderPlaced` as payload.
    """

    id: str
    type: str
    """Such as ``order.placed``; empty if neither headers nor value have it."""
    aggregate_type: str | None
    aggregate_id: str | None
    """Such as the order's number; by default the message's key."""
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
    """When the message was written to Kafka, UTC."""

    @cached_property
    def payload(self) -> Payload:
        """The body, parsed when it is first asked for and taken out of an envelope or CloudEvent.

        None for a tombstone. In the shape `flat` it has the members that the relay adds.

        Raises:
            ValueError: the value is not JSON, or JSON that is nested too deeply for Python.
        """
        return cast(Payload, self._parsed())

    def _parsed(self) -> Any:
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

    def with_payload(self, payload: object) -> Event[Any]:
        """Return the same event with another payload."""
        other = copy.copy(self)
        # Where the cached property keeps it.
        other.__dict__["payload"] = payload
        return other

    def identity(self, origin: str, *, by_key: bool) -> UUID:
        """Return the UUID that identifies the event in `processed_events`.

        That is the id where it is a UUID: there is only one such event. Another id, such as 1, is one of its
        origin's, and so is an idempotency key: they become a UUID (version 5) of both.

        Args:
            origin: where the event comes from: the topic, or the name that it has in `origins`.
            by_key: the idempotency key counts instead of the id, where the event has one.
        """
        if by_key and self.idempotency_key is not None:
            return _named("idempotency-key", origin, self.idempotency_key)
        return self._uuid or _named("id", origin, self.id)

    def content(self, *, by_key: bool) -> UUID | None:
        """Return a digest of what the event says, for an id that its origin may use again; otherwise None.

        It is the same in every shape of the value: a repetition after a change of OUTBOX_VALUE_FORMAT is one.
        """
        if self._uuid or (by_key and self.idempotency_key is not None):
            return None
        about = (self.type, self.aggregate_type, self.aggregate_id)
        try:
            return _named("content", *about, self.payload)
        except (ValueError, RecursionError):
            # No JSON: the bytes count.
            return _named("content", *about, (self.value or b"").hex())

    @cached_property
    def _uuid(self) -> UUID | None:
        # 32 decimal digits are a number with leading zeros.
        if self.id.isdecimal():
            return None
        try:
            return UUID(self.id)
        except ValueError:
            return None

    def __str__(self) -> str:
        place = f"{self.topic}, partition {self.partition}, offset {self.offset}"
        return f"{self.type or 'event'} {self.id} ({place})"


def _named(*parts: object) -> UUID:
    return uuid.uuid5(NAMESPACE, json.dumps(parts, sort_keys=True))


def is_envelope(body: object) -> bool:
    return isinstance(body, dict) and body.keys() == ENVELOPE


def is_cloudevent(body: object) -> bool:
    return isinstance(body, dict) and {"specversion", "id", "type", "source"} <= body.keys()
