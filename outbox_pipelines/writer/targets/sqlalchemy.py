"""Write through SQLAlchemy, on any driver; asynchronous targets use its synchronous core."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy

from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets.way import Way, no_transaction

if TYPE_CHECKING:
    from sqlalchemy import orm
    from sqlalchemy.ext import asyncio


def _on_connection(connection: sqlalchemy.Connection, query: Query) -> Sequence[Any]:
    refuse_unfit(connection)
    return _execute(connection, query)


def _execute(connection: sqlalchemy.Connection, query: Query) -> Sequence[Any]:
    numbered = connection.dialect.paramstyle.startswith("numeric")
    statement = query.statement.numbered if numbered else query.statement.percent
    # Bypass the compiler, which is not needed here.
    return connection.exec_driver_sql(statement, query.values).fetchall()


def refuse_unfit(connection: sqlalchemy.Connection) -> None:
    """Raise an `OutboxError` if the connection is in autocommit mode, or not to PostgreSQL."""
    if connection.dialect.name != "postgresql":
        raise OutboxError(f"this connection leads to {connection.dialect.name}: the outbox needs PostgreSQL")
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise no_transaction("use an engine without isolation_level='AUTOCOMMIT'")


def _on_session(session: orm.Session, query: Query) -> Sequence[Any]:
    connection = session.connection()
    refuse_unfit(connection)
    # The business rows first: their locks determine the order of an aggregate's events.
    session.flush()
    return _execute(connection, query)


def _on_scoped_session(scoped: orm.scoped_session[Any], query: Query) -> Sequence[Any]:
    return _on_session(scoped(), query)


async def _on_async_connection(connection: asyncio.AsyncConnection, query: Query) -> Sequence[Any]:
    return await connection.run_sync(_on_connection, query)


async def _on_async_session(session: asyncio.AsyncSession, query: Query) -> Sequence[Any]:
    return await session.run_sync(_on_session, query)


async def _on_async_scoped_session(scoped: asyncio.async_scoped_session[Any], query: Query) -> Sequence[Any]:
    return await _on_async_session(scoped(), query)


def ways() -> dict[type, Way]:
    """Return the ways for the loaded parts of SQLAlchemy; the ORM and asyncio are slow to import."""
    found: dict[type, Way] = {sqlalchemy.Connection: Way(_on_connection)}
    if orm := sys.modules.get("sqlalchemy.orm"):
        found |= {orm.Session: Way(_on_session), orm.scoped_session: Way(_on_scoped_session)}
    if asyncio := sys.modules.get("sqlalchemy.ext.asyncio"):
        found |= {
            asyncio.AsyncConnection: Way(_on_async_connection, asynchronous=True),
            asyncio.AsyncSession: Way(_on_async_session, asynchronous=True),
            asyncio.async_scoped_session: Way(_on_async_scoped_session, asynchronous=True),
        }
    return found
