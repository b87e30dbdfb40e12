"""The input and the result of the writer: an event to write, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID


class NewEvent(NamedTuple):
    """An event for `emit_many`; the members are the arguments of `emit`. Pass the optional ones by name."""

    aggregate_type: str
    aggregate_id: object
    event_type: str
    payload: object
    headers: Mapping[str, object] | None = None
    idempotency_key: str | None = None
    correlation_id: str | UUID | None = None
    causation_id: str | UUID | None = None
    traceparent: str | None = None
    version: int | None = None


class Emitted(NamedTuple):
    """The outcome of writing an event."""

    id: UUID
    """The event's id; for a duplicate, the id of the event that used the key first."""
    seq: int | None
    """Its position in the order of events; None for a duplicate."""
    duplicate: bool
    """True if the idempotency key was known: nothing was written."""
