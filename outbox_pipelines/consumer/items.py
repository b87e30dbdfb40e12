"""Current messages as items: read, with their handler, and grouped by the transaction that they can share.

Invariants:
- A shared transaction keeps its locks no longer than a few times `SECONDS`, whatever the handlers do.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from outbox_pipelines.consumer.config import Plan
from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event_reading import NAMESPACE, Event, Reader
from outbox_pipelines.consumer.figures import Types
from outbox_pipelines.consumer.handler_registry import Handler, Handlers
from outbox_pipelines.core.text import reason
from outbox_pipelines.writer.references import Reference

SECONDS: Final = 0.1
_FIRST: Final = 8
_MOST: Final = 10_000
_SHARED: Final = "shared"
_SINGLE: Final = "single"


@dataclass(slots=True)
class Item:
    """A current message and its handler; a message that is not a valid event has an error."""

    message: Any
    id: str
    """Identifies it in `processed_events`: a UUID, as text, since most need no other."""
    event: Event | None = None
    handler: Handler | None = None
    error: str = ""
    content: uuid.UUID | None = None
    """A digest of the event's content, if its origin can reuse the id."""
    given: Any = None
    """The handler's argument: the event, its payload, or both."""
    is_framed: bool = False
    """Whether the schema of its value has to be asked for before `given` is known."""
    reference: Reference | None = None
    """The body that has to be read before `given` is known."""
    protected: Event | None = None
    """The event whose payload has to be decrypted before `given` is known."""
    mark: tuple[str, str] = ("", "")
    """Its row in the service's own table of processed events, empty without one; see `dedupe_table`."""

    @property
    def is_alone(self) -> bool:
        """Whether a handler is called for it in a transaction of its own."""
        handler = self.handler
        return not self.error and handler is not None and not handler.batch and handler.per_transaction == 1

    @property
    def message_id(self) -> uuid.UUID:
        """The same as a UUID."""
        return uuid.UUID(self.id)


@dataclass
class ItemReader:
    """Reads messages as items.

    Args:
        mark: returns an event's row in the service's own table.
    """

    plan: Plan
    reader: Reader
    handlers: Handlers
    types: Types
    mark: Callable[[Event], tuple[str, str]]

    def read(self, message: Any) -> Item:
        """Return the item of a message; it has an error if it is no event, or does not fit its handler."""
        try:
            event = self.reader.read(message)
            handler = self.handlers.handler(event.type)
            if handler is None and not event.type:
                raise UnreadableError(f"{event} has no type: handle it with on_other, or send event-type")
        except UnreadableError as error:
            return unreadable(message, str(error))
        origin = self.plan.origins.get(event.topic, event.topic)
        event_id, content = event._identified(origin, by_key=self.plan.by_key)
        item = Item(message, event_id, event, handler, content=content)
        if handler is not None:
            self.types.handled(event.type)
        if handler is not None and not handler.takes(event):
            handler = item.handler = None
        if handler is not None:
            item.is_framed = self.plan.schema_of is not None and event._framed is not None
            try:
                if not item.is_framed:
                    prepare(item, event, handler, self.plan)
                # A service's own table knows one event of an id: replays are recorded in ours alone.
                if event.replay is None:
                    item.mark = self.mark(event)
            except UnreadableError as error:
                item.error = reason(str(error))
        return item


def prepare(item: Item, event: Event, handler: Handler, plan: Plan) -> None:
    """Set what the handler gets of a value in JSON, or the reference to what must be read first.

    Raises:
        UnreadableError: it does not fit the handler.
    """
    reference = _reference_of(event, is_needed=plan.body_of is not None)
    if reference is not None and plan.body_of is not None:
        item.reference = reference
        return
    if plan.decrypt is not None and event._may_be_protected:
        item.protected = event
        return
    try:
        item.given = handler.give(event)
    except UnreadableError as error:
        hint = "; its body is in a store: pass bodies=Bodies(…) to the consumer" if reference else ""
        raise UnreadableError(f"{error}{hint}") from None


def _reference_of(event: Event, *, is_needed: bool) -> Reference | None:
    try:
        return event.reference
    except ValueError as error:
        if is_needed:
            raise UnreadableError(f"{event} is rejected: {error}") from None
        return None


def unreadable(message: Any, error: str) -> Item:
    """Return a message that becomes a dead letter, identified by its place because it has no valid id."""
    place = f"{message.topic()}/{message.partition()}/{message.offset()}"
    return Item(message, str(uuid.uuid5(NAMESPACE, place)), error=reason(error))


class Pace:
    """How many events are handled together: as many as their handlers finish in about `SECONDS`."""

    def __init__(self, events: int | None = None) -> None:
        self.events = _FIRST if events is None else events

    def took(self, events: int, seconds: float) -> None:
        """Learn from a transaction, or from the messages of a poll."""
        if seconds > SECONDS:
            self.events = max(1, self.events // 2)
        elif seconds < SECONDS / 2 and events >= self.events:
            self.events = min(2 * self.events, _MOST)

    def too_long(self, events: int) -> None:
        """Learn from a transaction that was rolled back after so many events."""
        self.events = max(1, min(events, self.events) // 2)


def groups(items: Sequence[Item], pace: Pace, *, shares: bool) -> Iterator[Sequence[Item]]:
    """Group adjacent items that one transaction can have.

    Args:
        shares: whether events of any handler can share a transaction.
    """
    if len(items) == 1:
        yield items
        return
    for kind, neighbors in groupby(items, lambda each: _kind(each, shares)):
        same = list(neighbors)
        limit = 1
        if isinstance(kind, Handler):
            limit = kind.batch or 1
        elif kind == _SHARED:
            limit = min((each.handler.per_transaction for each in same if each.handler), default=len(same))
        start = 0
        while start < len(same):
            # Asked for each time: it changes with each transaction.
            size = min(limit, pace.events) if kind == _SHARED else limit
            yield same[start : start + size]
            start += size


def _kind(item: Item, shares: bool) -> Handler | str:
    """Return what adjacent items have in common if one transaction can have them."""
    if item.error:
        return _SINGLE
    if item.handler is None:
        # Between two events that share a transaction it separates nothing.
        return _SHARED if shares else _SINGLE
    if item.handler.batch:
        return item.handler
    return _SHARED if item.handler.per_transaction > 1 else _SINGLE
