"""Write through psycopg2: connections and cursors."""

from __future__ import annotations

from typing import Any, Final

from psycopg2 import extensions

from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets import Way, no_transaction


def _on_connection(connection: Any, query: Query) -> list[tuple[Any, ...]]:
    if connection.async_:
        raise OutboxError(
            "psycopg2's asynchronous mode is unsupported: use psycopg.AsyncConnection or asyncpg"
        )
    is_idle = connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    if connection.autocommit and is_idle:
        raise no_transaction("set `connection.autocommit = False` and commit after both")
    # A plain cursor: the caller's may return dicts, or be a server-side cursor.
    with connection.cursor(cursor_factory=extensions.cursor) as cursor:
        cursor.execute(query.statement.percent, query.values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def _on_cursor(cursor: Any, query: Query) -> list[tuple[Any, ...]]:
    return _on_connection(cursor.connection, query)


WAYS: Final[dict[type, Way]] = {
    extensions.connection: Way(_on_connection),
    extensions.cursor: Way(_on_cursor),
}
