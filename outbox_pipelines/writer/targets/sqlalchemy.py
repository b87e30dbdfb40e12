"""Write through SQLAlchemy, on any driver; asynchronous targets use its synchronous core."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy
from sqlalchemy import exc

from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.statements import Query
from outbox_pipelines.writer.targets import Way, no_transaction

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
    try:
        connection = session.connection()
    except exc.UnboundExecutionError as error:
        raise OutboxError(
            "the session has no engine of its own, only binds: call session.flush(), then "
            'emit(session.connection(bind_arguments={"mapper": Order}), …) with the class of the row'
        ) from error
    refuse_unfit(connection)
    # Without a public name in all releases. `flush` would fail with "already flushing".
    if getattr(session, "_flushing", False):
        raise OutboxError(
            "emit was called in a listener of the session's flush, which has not written all rows: in "
            "before_flush use session.add(OutboxEvent(…)), with a listener registered with insert=True; in "
            "after_flush pass session.connection()"
        )
    # The business rows first: their locks determine the order of an aggregate's events.
    session.flush()
    refuse_split(session, connection)
    _refuse_later(session)
    return _execute(connection, query)


def _refuse_later(session: orm.Session) -> None:
    """Look again at the commit, if the session's rows may be in several databases."""
    # `__binds` is private; without it only what was written before the event is known.
    if not getattr(session, "_Session__binds", None) and "get_bind" not in type(session).__dict__:
        return
    if _EMITTED_IN not in session.info:
        sqlalchemy.event.listen(session, "before_commit", _look_again)
    session.info[_EMITTED_IN] = session.get_transaction()


def _look_again(session: orm.Session) -> None:
    if session.info[_EMITTED_IN] is session.get_transaction():
        session.flush()
        refuse_split(session, session.connection())


def refuse_split(session: orm.Session, connection: sqlalchemy.Connection) -> None:
    """Raise an `OutboxError` if the session's transaction has also written to another database."""
    transaction = session.get_transaction()
    # `connections` is public as of 2.1.7.
    entries = transaction._connections.values() if transaction else ()
    for other in {entry[0] for entry in entries} - {connection}:
        # A transaction that only reads has no id. Of other databases this is not known.
        if other.dialect.name != "postgresql" or other.exec_driver_sql(_HAS_WRITTEN).scalar():
            raise OutboxError(
                f"the session has written to two databases, {other.engine.url.database} and, with the event, "
                f"{connection.engine.url.database}: they commit separately. Bind the outbox and the rows to "
                "one engine, or use a session for each database"
            )


# A key in `session.info`: the transaction in which an event was last written.
_EMITTED_IN: Final = "outbox_pipelines.emitted_in"
_HAS_WRITTEN: Final = "SELECT pg_current_xact_id_if_assigned() IS NOT NULL"


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
