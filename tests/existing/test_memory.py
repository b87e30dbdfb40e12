"""A relay of an existing table needs little memory, whatever the rows."""

from __future__ import annotations

import json

import pytest

from tests.existing.textbook import Table
from tests.relay.sizes import SIZES, assert_peak, insert


@pytest.mark.extended
def test_memory_is_bounded_whatever_the_rows(table: Table) -> None:
    """Guards against claims that are read whole before their size is known."""
    with table.connect() as connection:
        for events, columns in SIZES.values():
            insert(connection, "' || i || '", events, table="events", **columns)
        insert(connection, "small", 300, table="events")
    assert_peak(
        {
            "OUTBOX_DSN": table.settings.dsn,
            "OUTBOX_KAFKA": table.settings.kafka,
            "OUTBOX_TOPIC": table.settings.topic,
            "OUTBOX_TABLE": json.dumps(table.settings.table),
        }
    )
    assert sum(message.key == "small" for message in table.messages()) == 300
