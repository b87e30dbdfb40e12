"""`RecordsEvents`: rows whose methods record events before the database has generated their ids.

Invariants:
- Recorded events belong to the object's state: they are written with it, and discarded with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple
from uuid import UUID

import sqlalchemy
from sqlalchemy.orm.attributes import flag_dirty

from outbox_pipelines.writer import content
from outbox_pipelines.writer.context import surroundings
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.events import NewEvent


class Recorded(NamedTuple):
    """A checked event without its aggregate's id, and its position in the order of `record`."""

    number: int
    row: content.Row


class RecordsEvents:
    """A mixin for mapped classes: the flush that writes the row writes its recorded events."""

    __aggregate_type__: ClassVar[str] = ""
    __outbox_schema__: ClassVar[str | None] = None

    _outbox_recorded: list[Recorded] | None = None

    def record(
        self,
        event_type: str,
        payload: object,
        *,
        headers: Mapping[str, object] | None = None,
        idempotency_key: str | None = None,
        correlation_id: str | UUID | None = None,
        causation_id: str | UUID | None = None,
        traceparent: str | None = None,
        version: int | None = None,
    ) -> None:
        """Record an event of this aggregate; arguments and errors are those of `emit`.

        An event whose idempotency key is already used at the flush is not written. If no column of the row
        changes, the flush does not lock the row: lock it yourself if the order of its events matters.
        """
        event = NewEvent(
            self.__aggregate_type__,
            _NOT_YET,
            event_type,
            payload,
            headers,
            idempotency_key,
            correlation_id,
            causation_id,
            traceparent,
            version,
        )
        recorded = Recorded(next(_NUMBERS), content.row(event, surroundings()))
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


_NUMBERS: Final = itertools.count()
_NOT_YET: Final = "drawn by the flush"


def with_id(recorded: Recorded, aggregate: RecordsEvents) -> content.Row:
    """Return the event's row with the aggregate's id."""
    found = aggregate.outbox_aggregate_id()
    return recorded.row._replace(aggregate_id=content.name("aggregate_id", found, any_kind=True))
