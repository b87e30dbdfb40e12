"""Write through asyncpg: connections, also those of a pool."""

from __future__ import annotations

from typing import Any, Final

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets import Way, no_transaction


async def _on_connection(connection: Any, query: Query) -> list[Any]:
    if not connection.is_in_transaction():
        raise no_transaction("`async with connection.transaction():`")
    rows: list[Any] = await connection.fetch(query.statement.numbered, *query.values)
    return rows


_WAY: Final = Way(_on_connection, asynchronous=True)
WAYS: Final[dict[type, Way]] = {asyncpg.Connection: _WAY, PoolConnectionProxy: _WAY}
