"""The outbox is append-only: what was written stays as it was written."""

from __future__ import annotations

import psycopg
import pytest

from tests.schema.events import insert, one
from tests.schema.servers import Connection

CHANGES = [
    "UPDATE {} SET payload = '1'",
    "UPDATE {} SET created_at = created_at - interval '1 day'",
    "DELETE FROM {}",
    "TRUNCATE {}",
]


@pytest.mark.parametrize("where", ["table", "day"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_refused(connection: Connection, change: str, where: str) -> None:
    """Guards against an event that changes after it was relayed or archived: through the table, or through
    one day of it."""
    insert(connection)
    [day] = one(connection, "SELECT tableoid::regclass::text FROM outbox")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="the table is append-only") as refused:
        connection.execute(change.format("outbox" if where == "table" else day).encode())
    assert "write another one" in (refused.value.diag.message_hint or "")


def test_an_upsert_is_refused(connection: Connection) -> None:
    """Guards against ON CONFLICT DO UPDATE as a way around the guard."""
    written = insert(connection)
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "
            "VALUES (%s, 'order', '1', 'e', '{}') ON CONFLICT (id, created_at) DO UPDATE SET payload = '1'",
            [written.id],
        )


def test_a_day_made_later_is_guarded_too(connection: Connection) -> None:
    """Guards against a guard that only the days made by the first migration have."""
    connection.execute("SELECT outbox_ensure_partitions(20)")
    [day] = one(connection, "SELECT 'outbox_' || to_char(max(day), 'YYYYMMDD') FROM outbox_days")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        connection.execute(f"TRUNCATE {day}".encode())


def test_a_declared_rebase_may_only_update(connection: Connection) -> None:
    """Guards against a declaration for one purpose that opens DELETE and TRUNCATE as well."""
    insert(connection)
    connection.execute("SET LOCAL outbox.rebase = on")
    connection.execute("UPDATE outbox SET tx = pg_current_xact_id()")
    for change in ("DELETE FROM outbox", "TRUNCATE outbox"):
        with pytest.raises(psycopg.errors.FeatureNotSupported), connection.transaction():
            connection.execute(change.encode())
