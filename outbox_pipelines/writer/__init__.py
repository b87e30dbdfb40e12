"""Write outbox events in the transaction of your business rows: `emit` one, or `emit_many`.

    with psycopg.connect(dsn) as connection:
        connection.execute("UPDATE orders SET state = 'placed' WHERE id = %s", [order_id])
        emit(connection, "order", order_id, "order.placed", {"total": 5})

    async with session.begin():                       # SQLAlchemy's AsyncSession
        order.state = "placed"
        await emit(session, "order", order.id, "order.placed", order_body)

Invariants:
- An event is written on the caller's connection and in the caller's transaction, or not at all.
- Nothing is imported but the standard library and the caller's own driver.
"""

from __future__ import annotations

from outbox_pipelines.writer.bytes_payload import BytesPayload
from outbox_pipelines.writer.calls import cancel, emit, emit_many
from outbox_pipelines.writer.content import validate_with
from outbox_pipelines.writer.context import correlated, in_schema
from outbox_pipelines.writer.errors import (
    AutocommitError,
    BodyStoreError,
    InvalidEventError,
    OutboxError,
    PayloadTooLargeError,
)
from outbox_pipelines.writer.events import Emitted, NewEvent, TypedEvent, UnkeyedEvent
from outbox_pipelines.writer.keys import derive_key

__all__ = [
    "AutocommitError",
    "BodyStoreError",
    "BytesPayload",
    "Emitted",
    "InvalidEventError",
    "NewEvent",
    "OutboxError",
    "PayloadTooLargeError",
    "TypedEvent",
    "UnkeyedEvent",
    "cancel",
    "correlated",
    "derive_key",
    "emit",
    "emit_many",
    "in_schema",
    "validate_with",
]
