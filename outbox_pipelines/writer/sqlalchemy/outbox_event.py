"""`OutboxEvent`: an event written by `session.add`, and a row of the outbox for `select`.

Invariants:
- The table has its own metadata: `create_all` does not create it, autogenerate does not see it.
- An event is checked when it is created, and not changed afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, Column, DateTime, Integer, MetaData, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped
from sqlalchemy.orm.attributes import set_committed_value

from outbox_pipelines.writer import content
from outbox_pipelines.writer.context import surroundings
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.events import MISSING, Emitted, NewEvent, UnkeyedEvent, completed


def outbox_table(schema: str | None = None) -> Table:
    """Return the outbox table, for your own model; without a schema, the search_path determines it.

    class Event(OutboxEventMixin, Base):
        __table__ = outbox_table(schema="billing")
    """
    # Without tx, which only the relay uses and for which SQLAlchemy has no type.
    return Table(
        "outbox",
        MetaData(),
        Column("id", Uuid, primary_key=True),
        # The default is evaluated only by inserts that bypass the session's flush.
        Column("seq", BigInteger, nullable=False, default=_refuse_bulk),
        Column("aggregate_type", Text, nullable=False),
        Column("aggregate_id", Text, nullable=False),
        Column("event_type", Text, nullable=False),
        Column("payload", JSONB, nullable=False),
        Column("headers", JSONB),
        Column("idempotency_key", Text),
        Column("correlation_id", Text),
        Column("causation_id", Text),
        Column("traceparent", Text),
        Column("version", Integer),
        Column("created_at", DateTime(timezone=True), primary_key=True),
        schema=schema,
    )


def _refuse_bulk() -> int:
    raise OutboxError(
        "bulk_save_objects and insert() cannot write an outbox event: use session.add or "
        "session.add_all, or call emit_many"
    )


class OutboxEventMixin:
    """A mixin that makes a mapped class an event; for your own base class, with `outbox_table`."""

    if TYPE_CHECKING:
        __table__: ClassVar[Table]
        id: Mapped[UUID]
        seq: Mapped[int | None]
        aggregate_type: Mapped[str]
        aggregate_id: Mapped[str]
        event_type: Mapped[str]
        payload: Mapped[Any]
        headers: Mapped[dict[str, Any] | None]
        idempotency_key: Mapped[str | None]
        correlation_id: Mapped[str | None]
        causation_id: Mapped[str | None]
        traceparent: Mapped[str | None]
        version: Mapped[int | None]
        created_at: Mapped[datetime]

    _row: content.Row
    _duplicate = False
    # In a transaction that is open or committed.
    _is_written = False

    def __init__(
        self,
        aggregate_type: str | UnkeyedEvent,
        aggregate_id: object = MISSING,
        event_type: str = MISSING,
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
        """Create an event. Arguments and errors are those of `emit`; ids and trace surround this call.

        After the flush the event has its `id` and `seq`, and has left the session: it cannot be changed,
        expired or refreshed; if it is delayed, `seq` is None. It can be added again after a rollback, and is
        refused otherwise.
        """
        event = NewEvent(
            aggregate_type,  # type: ignore[arg-type]  # a typed event, which is completed
            aggregate_id,
            event_type,
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
        self._row = content.row(completed(event), surroundings())
        for column, value in self._row._asdict().items():
            if column not in self.__table__.columns:
                continue
            is_json = column in ("payload", "headers") and value is not None
            set_committed_value(self, column, json.loads(value) if is_json else value)

    @property
    def duplicate(self) -> bool:
        """Whether the idempotency key was already used at the flush, so that nothing was written.

        Then `id` is the id of the event that used the key first, and `seq` is None.
        """
        return self._duplicate

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise OutboxError(f"{name} of an outbox event cannot be changed: create another event")
        super().__setattr__(name, value)

    def _written(self, emitted: Emitted) -> None:
        set_committed_value(self, "id", emitted.id)
        set_committed_value(self, "seq", emitted.seq)
        self._duplicate = emitted.duplicate
        self._is_written = True


class _Base(DeclarativeBase):
    pass


class OutboxEvent(OutboxEventMixin, _Base):
    """An event, written by the flush after `session.add`; and a row of the outbox, for `select`."""

    __table__ = outbox_table()
