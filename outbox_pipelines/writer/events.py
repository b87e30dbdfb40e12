"""The input and the result of the writer: an event to write, and its outcome.

An event can be an object of a class that names its type and key, such as

    @dataclass
    class OrderPlaced:
        __event_type__ = "order.placed"
        __aggregate_type__ = "order"
        __aggregate_id__ = "order_id"                 # the attribute that has the aggregate's id
        order_id: int
        total: Decimal

`outbox catalog classes` generates such classes from the event catalog.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from outbox_pipelines.writer.errors import OutboxError


class UnkeyedEvent(Protocol):
    """A typed event whose class does not say which attribute has the aggregate's id: pass `aggregate_id`."""

    @property
    def __event_type__(self) -> str: ...
    @property
    def __aggregate_type__(self) -> str: ...


class TypedEvent(UnkeyedEvent, Protocol):
    """An event whose class names its type and key: a dataclass, or a model of pydantic or attrs.

    A class can also have `__event_version__`, an integer: the event's `version`; and `__deliver_after__`, a
    duration: its `deliver_after` unless one is given.
    """

    @property
    def __aggregate_id__(self) -> str: ...


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
    deliver_after: datetime | timedelta | None = None
    later_events_wait: bool = False


class _Missing:
    """The type of the default of an argument that a typed event makes superfluous."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Final[Any] = _Missing()
_NONE: Final = NewEvent(MISSING, MISSING, MISSING, MISSING)


def completed(event: NewEvent) -> NewEvent:
    """Return an event as it is, or with what a typed event names, which was passed as its `aggregate_type`.

    Raises:
        OutboxError: an argument is missing.
    """
    typed: Any = event.aggregate_type
    if event.payload is not MISSING and event.event_type is not MISSING and event.aggregate_id is not MISSING:
        return event
    if event.payload is not MISSING or event.event_type is not MISSING or isinstance(typed, str):
        raise OutboxError(
            "an argument is missing: give aggregate_type, aggregate_id, event_type and payload, or an object "
            "whose class names its event type"
        )
    if event.aggregate_id is not MISSING and hasattr(typed, "__aggregate_id__"):
        kind = type(typed).__qualname__
        raise OutboxError(f"aggregate_id is superfluous: {kind} names it in __aggregate_id__")
    return of_typed(typed, event)


def of_typed(event: Any, arguments: NewEvent = _NONE) -> NewEvent:
    """Return a typed event as a `NewEvent`, with the options of `arguments`, and its aggregate's id if given.

    Raises:
        OutboxError: its class does not name an event.
    """
    kind = type(event)
    if isinstance(event, type):
        raise OutboxError(f"{event.__qualname__} is a class: pass an object of it")
    if isinstance(event, NewEvent | list | tuple):
        raise OutboxError(
            f"emit was given a {kind.__name__} as its event: pass a list of events to emit_many"
        )
    aggregate_id = arguments.aggregate_id
    needed = _NAMES if aggregate_id is MISSING else _NAMES[:2]
    names: list[Any] = [getattr(kind, name, None) for name in needed]
    if not all(isinstance(name, str) for name in names):
        missing = next(name for name in needed if not isinstance(getattr(kind, name, None), str))
        hint = ": pass aggregate_id" if missing == "__aggregate_id__" else ""
        raise OutboxError(f"{kind.__qualname__} is no event: its class has no {missing}, a text{hint}")
    # If a dataclass exists, its module is loaded.
    fields: Any = sys.modules["dataclasses"].fields(kind) if hasattr(kind, "__dataclass_fields__") else ()
    if annotated := sorted({field.name for field in fields} & {*_NAMES}):
        raise OutboxError(
            f"{annotated[0]} of {kind.__qualname__} is a field of the dataclass and would be in the payload: "
            "write it without an annotation, or annotate ClassVar[str]"
        )
    event_type, aggregate_type, *attributes = names
    for attribute in attributes:
        if not hasattr(event, attribute):
            raise OutboxError(
                f"{kind.__qualname__} has no attribute {attribute!r}: __aggregate_id__ is the name of the "
                "one with the aggregate's id"
            )
        aggregate_id = getattr(event, attribute)
    made = arguments._replace(
        aggregate_type=aggregate_type, aggregate_id=aggregate_id, event_type=event_type, payload=event
    )
    if made.version is None:
        made = made._replace(version=getattr(kind, "__event_version__", None))
    if made.deliver_after is None:
        made = made._replace(deliver_after=getattr(kind, "__deliver_after__", None))
    return made


_NAMES: Final = ("__event_type__", "__aggregate_type__", "__aggregate_id__")


class Emitted(NamedTuple):
    """The outcome of writing an event."""

    id: UUID
    """The event's id; for a duplicate, the id of the event that used the key first."""
    seq: int | None
    """Its position in the order of events; None for a duplicate, and for an event that is delayed."""
    duplicate: bool
    """True if the idempotency key was known: nothing was written."""
