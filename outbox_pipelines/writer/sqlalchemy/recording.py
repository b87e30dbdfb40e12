"""`RecordsEvents`: rows whose methods record events before the database has generated their ids.

Invariants:
- Recorded events belong to the object's state: they are written with it, and discarded with it.
- If only a part of the changes is discarded, the flush is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import ClassVar, Final, NamedTuple
from uuid import UUID

import sqlalchemy
from sqlalchemy.orm.attributes import flag_dirty

from outbox_pipelines.writer import content
from outbox_pipelines.writer.context import surroundings
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.events import MISSING, NewEvent, UnkeyedEvent, completed, of_typed


class Recorded(NamedTuple):
    """A checked event without its aggregate's id."""

    number: int
    """Its position in the order of `record`."""
    row: content.Row
    changes: frozenset[str]
    """The attributes that were changed and not flushed when it was recorded."""


class RecordsEvents:
    """A mixin for mapped classes: the flush that writes the row writes its recorded events."""

    __aggregate_type__: ClassVar[str] = ""
    __outbox_schema__: ClassVar[str | None] = None

    _outbox_recorded: list[Recorded] | None = None

    def record(
        self,
        event_type: str | UnkeyedEvent,
        payload: object = MISSING,
        *,
        headers: Mapping[str, object] | None = None,
        idempotency_key: str | None = None,
        correlation_id: str | UUID | None = None,
        causation_id: str | UUID | None = None,
        traceparent: str | None = None,
        version: int | None = None,
        deliver_after: datetime | timedelta | None = None,
        later_events_wait: bool = False,
    ) -> None:
        """Record an event of this aggregate; arguments and errors are those of `emit`.

        Change the row first, then record: an operation that discards the change (`rollback`, `expire`,
        `refresh`, `populate_existing`) discards the event. If it discards only a part of the changes, the
        flush is refused.

        An event whose idempotency key is already used at the flush is not written. If no column of the row
        changes, the flush does not lock the row: lock it yourself if the order of its events matters.
        """
        event = NewEvent(
            self.__aggregate_type__,
            _NOT_YET,
            event_type,  # type: ignore[arg-type]  # or a typed event
            payload,
            headers=headers,
            idempotency_key=idempotency_key,
            correlation_id=correlation_id,
            causation_id=causation_id,
            traceparent=traceparent,
            version=version,
            deliver_after=deliver_after,
            later_events_wait=later_events_wait,
        )
        if isinstance(event_type, str) or payload is not MISSING:
            event = completed(event)
        else:
            event = of_typed(event_type, event)
            if event.aggregate_type != self.__aggregate_type__:
                raise OutboxError(
                    f"{type(self).__name__} cannot record {event.event_type}, an event of "
                    f"{event.aggregate_type}: __aggregate_type__ of the row is {self.__aggregate_type__!r}"
                )
        session = sqlalchemy.orm.object_session(self)
        if session is not None and HAS_WRITTEN in session.info:
            raise OutboxError(
                f"{event.event_type} was recorded in an after_flush listener, when the flush had written its "
                "events: it would be lost. Record in a before_flush listener, registered with insert=True"
            )
        row = content.row(event, surroundings())
        recorded = Recorded(next(_NUMBERS), row, _changes(self))
        self._outbox_recorded = [*(self._outbox_recorded or ()), recorded]
        # Otherwise a session without a changed column would not flush the object, or not keep it.
        flag_dirty(self)

    def outbox_aggregate_id(self) -> object:
        """Return the aggregate's id: its primary key if that is one column. Override it for another id."""
        key = sqlalchemy.inspect(self).mapper.primary_key_from_instance(self)
        if len(key) > 1:
            raise OutboxError(
                f"the key of {type(self).__name__} has {len(key)} columns: override outbox_aggregate_id"
            )
        return key[0]


# A key in `session.info`: the flush that is going on has written its events.
HAS_WRITTEN: Final = "outbox_pipelines.has_written"
_NUMBERS: Final = itertools.count()
_NOT_YET: Final = "drawn by the flush"


def _changes(aggregate: RecordsEvents) -> frozenset[str]:
    state = sqlalchemy.inspect(aggregate)
    return frozenset(state.manager).difference(state.unmodified)


def discard(aggregate: RecordsEvents | None, attributes: object) -> None:
    """Discard the events with the changes of all attributes (None); `refuse_torn` judges a part of them."""
    # SQLAlchemy passes None for an object that is no longer referenced.
    if attributes is None and aggregate is not None and aggregate._outbox_recorded:
        aggregate._outbox_recorded = None


def refuse_torn(aggregate: RecordsEvents) -> None:
    """Raise an `OutboxError` if a change has been discarded that preceded a recorded event."""
    if not sqlalchemy.inspect(aggregate).persistent:
        return
    present = _changes(aggregate)
    for recorded in aggregate._outbox_recorded or ():
        if lost := sorted(recorded.changes - present):
            raise OutboxError(
                f"{type(aggregate).__name__} has recorded {recorded.row.event_type}, but the change of "
                f"{', '.join(lost)} before it was discarded by session.expire, session.refresh or an UPDATE "
                "statement: call session.flush() before these, and roll back this transaction"
            )


def with_id(recorded: Recorded, aggregate: RecordsEvents) -> content.Row:
    """Return the event's row with the aggregate's id."""
    found = aggregate.outbox_aggregate_id()
    return recorded.row._replace(aggregate_id=content.name("aggregate_id", found))
