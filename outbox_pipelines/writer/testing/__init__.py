"""For an application's own tests: which events did the code emit?

    with captured() as events:                        # without a database
        place_order(connection=None, order_id=42)
    assert_emitted(events, "order.placed", aggregate_id=42, payload={"total": 5})

    place_order(connection, order_id=42)              # in a transaction of a real one, to be rolled back
    assert_emitted(events_of(connection), "order.placed", aggregate_id=42, payload={"total": 5})

Invariants:
- Both give the same events for the same calls: content as JSON, as a consumer reads it.
- What production refuses to write for its content is refused here, by the same code.
"""

from __future__ import annotations

from outbox_pipelines.writer.testing.assertions import assert_emitted, assert_nothing_emitted
from outbox_pipelines.writer.testing.capture import captured
from outbox_pipelines.writer.testing.events import WrittenEvent
from outbox_pipelines.writer.testing.transaction import events_of

__all__ = ["WrittenEvent", "assert_emitted", "assert_nothing_emitted", "captured", "events_of"]
