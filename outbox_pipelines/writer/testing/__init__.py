"""Check in an application's tests which events the code emits.

    with captured() as events:                        # without a database
        place_order(connection=None, order_id=42)
    assert_emitted(events, "order.placed", aggregate_id=42, payload={"total": 5})

    place_order(connection, order_id=42)              # in a real database's transaction; roll it back
    assert_emitted(events_of(connection), "order.placed", aggregate_id=42, payload={"total": 5})

Invariants:
- Both return the same events for the same calls: content as JSON, as a consumer reads it.
- Content that production refuses is refused here too, by the same code.
"""

from __future__ import annotations

from outbox_pipelines.writer.testing.assertions import assert_emitted, assert_nothing_emitted
from outbox_pipelines.writer.testing.capture import captured
from outbox_pipelines.writer.testing.written import WrittenEvent, events_of

__all__ = ["WrittenEvent", "assert_emitted", "assert_nothing_emitted", "captured", "events_of"]
