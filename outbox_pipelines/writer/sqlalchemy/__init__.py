"""Events as objects of SQLAlchemy's session, for `Session` and `AsyncSession`; the flush writes them.

    session.add(OutboxEvent("order", order.id, "order.placed", {"total": 5}))

    class Order(RecordsEvents, Base):                 # or: rows that say themselves what happened
        __aggregate_type__ = "order"

        def place(self) -> None:
            self.state = "placed"
            self.record("order.placed", {"total": self.total})

Importing this lets every session of the process write them. Bulk statements (`insert(OutboxEvent)`) go past
all of it.

Invariants:
- An event is written by the flush that writes the rows, after them, in the session's transaction, as
  `emit_many` writes it.
- Events that were added are written in the order of `session.add`; those that were recorded follow, in the
  order of `record`.
- Each is written once. What is rolled back is not written by a later commit.
"""

from __future__ import annotations

from outbox_pipelines.writer.sqlalchemy import flush as _flush
from outbox_pipelines.writer.sqlalchemy.event import OutboxEvent, OutboxEventMixin, outbox_table
from outbox_pipelines.writer.sqlalchemy.recording import RecordsEvents

_flush.listen()

__all__ = ["OutboxEvent", "OutboxEventMixin", "RecordsEvents", "outbox_table"]
