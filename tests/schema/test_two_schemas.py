"""Two outboxes in one database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_pipelines.database import schema
from tests.schema.events import insert
from tests.schema.servers import Database

Pair = tuple[Database, Database]


@pytest.fixture
def pair(empty: Database) -> Pair:
    both = (replace(empty, schema="My Outbox"), replace(empty, schema="billing"))
    for one in both:
        schema.migrate(one.settings)
    return both


def test_they_do_not_see_each_others_events(pair: Pair) -> None:
    """Guards against a function or a view that finds the tables of whichever schema comes first."""
    for one in pair:
        with one.connect() as connection:
            # The same key in both, through the trigger and through the function.
            insert(connection, aggregate_id=one.schema, idempotency_key="k1")
            connection.execute(
                "SELECT outbox_emit('order', %s, 'e', '{}', idempotency_key => 'k2')", [one.schema]
            )
    for one in pair:
        assert one.rows("SELECT aggregate_id, status FROM outbox_events") == [(one.schema, "PENDING")] * 2
        assert one.value("SELECT count(*) FROM outbox_keys") == 2


def test_they_work_for_a_client_with_another_search_path(pair: Pair) -> None:
    """Guards against triggers that fail, or write elsewhere, when a client names the schema instead of a
    search_path."""
    ours, other = pair
    with replace(ours, schema="billing").connect() as connection:
        connection.execute(
            'INSERT INTO "My Outbox".outbox (aggregate_type, aggregate_id, event_type, payload, '
            "idempotency_key) VALUES ('order', '1', 'e', '{}', 'k1')"
        )
        connection.execute("""SELECT "My Outbox".outbox_emit('order', '2', 'e', '{}', NULL, 'k2')""")
    assert ours.value("SELECT count(*) FROM outbox_events") == 2
    assert ours.value("SELECT count(*) FROM outbox_keys") == 2
    assert other.value("SELECT count(*) FROM outbox_events") == 0
    assert other.value("SELECT count(*) FROM outbox_keys") == 0
