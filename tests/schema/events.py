"""Rows for the outbox, as a client writes them."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from psycopg import sql
from psycopg.types.json import Jsonb

from tests.schema.servers import Connection

COLUMNS: dict[str, object] = {
    "aggregate_type": "order",
    "aggregate_id": "42",
    "event_type": "order.placed",
    "payload": Jsonb({"total": 5}),
}


class Written(NamedTuple):
    id: UUID
    seq: int


def insert(connection: Connection, table: str = "outbox", /, **columns: object) -> Written:
    """Inserts one event that has these columns."""
    given = COLUMNS | columns
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING id, seq").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, given)),
        sql.SQL(", ").join(sql.Placeholder() * len(given)),
    )
    row = connection.execute(statement, list(given.values())).fetchone()
    assert row is not None
    return Written(*row)


def one(connection: Connection, query: str, *values: object) -> tuple[Any, ...]:
    """The one row that a query answers."""
    [row] = connection.execute(query.encode(), values or None)
    return row


def purge_after_claims(connection: Connection) -> None:
    """From now on keys of events that are written are purged after each claim, before it is looked at."""
    connection.execute(
        "CREATE FUNCTION pg_temp.purge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "DELETE FROM outbox_keys WHERE event_id IN (SELECT id FROM outbox); RETURN NULL; END $$"
    )
    connection.execute(
        "CREATE TRIGGER purge AFTER INSERT ON outbox_keys FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.purge()"
    )
