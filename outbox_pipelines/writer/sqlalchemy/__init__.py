"""Events as objects of an SQLAlchemy `Session` or `AsyncSession`; the flush writes them.

    session.add(OutboxEvent("order", order.id, "order.placed", {"total": 5}))

    class Order(RecordsEvents, Base):                 # or: rows that record their events
        __aggregate_type__ = "order"

        def place(self) -> None:
            self.state = "placed"
            self.record("order.placed", {"total": self.total})

Importing this module enables every session of the process to write them. What copies objects
(`session.merge`, `bulk_save_objects`) is refused; statements such as `insert(Order)` record nothing.

Invariants:
- An event is written by the flush that writes the rows, after them, in the session's transaction, as
  `emit_many` writes it.
- Added events are written in the order of `session.add`; recorded events follow, in the order of `record`.
- Each is written once. A later commit does not write events that were rolled back.
"""

from __future__ import annotations

from outbox_pipelines.writer.sqlalchemy import flush as _flush
from outbox_pipelines.writer.sqlalchemy.copies import refuse_copies as _refuse_copies
from outbox_pipelines.writer.sqlalchemy.outbox_event import OutboxEvent, OutboxEventMixin, outbox_table
from outbox_pipelines.writer.sqlalchemy.recording import RecordsEvents

_flush.listen()
_refuse_copies()

__all__ = ["OutboxEvent", "OutboxEventMixin", "RecordsEvents", "outbox_table"]
