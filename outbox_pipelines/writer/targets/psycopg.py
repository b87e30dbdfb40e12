"""Write through psycopg: connections and cursors, synchronous and asynchronous."""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets import Way, no_transaction


def _on_connection(connection: psycopg.Connection[Any], query: Query) -> list[tuple[Any, ...]]:
    if connection.autocommit:
        if connection.info.pipeline_status:
            # The transaction status is known only after the pending statements have returned.
            with connection.pipeline() as pipeline:
                pipeline.sync()
        _refuse_idle(connection.info, "`with connection.transaction():`")
    # A plain cursor: the caller's may return dicts, or use other placeholders. It need not be closed.
    cursor = psycopg.Cursor(connection, row_factory=tuple_row)
    return cursor.execute(query.statement.percent, query.values).fetchall()


async def _on_async_connection(
    connection: psycopg.AsyncConnection[Any], query: Query
) -> list[tuple[Any, ...]]:
    if connection.autocommit:
        if connection.info.pipeline_status:
            async with connection.pipeline() as pipeline:
                await pipeline.sync()
        _refuse_idle(connection.info, "`async with connection.transaction():`")
    cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
    await cursor.execute(query.statement.percent, query.values)
    return await cursor.fetchall()


def _refuse_idle(info: psycopg.ConnectionInfo, instead: str) -> None:
    if info.transaction_status == TransactionStatus.IDLE:
        raise no_transaction(instead)


def _on_cursor(cursor: psycopg.Cursor[Any], query: Query) -> list[tuple[Any, ...]]:
    return _on_connection(cursor.connection, query)


async def _on_async_cursor(cursor: psycopg.AsyncCursor[Any], query: Query) -> list[tuple[Any, ...]]:
    return await _on_async_connection(cursor.connection, query)


WAYS: Final[dict[type, Way]] = {
    psycopg.Connection: Way(_on_connection),
    psycopg.Cursor: Way(_on_cursor),
    psycopg.AsyncConnection: Way(_on_async_connection, asynchronous=True),
    psycopg.AsyncCursor: Way(_on_async_cursor, asynchronous=True),
}
