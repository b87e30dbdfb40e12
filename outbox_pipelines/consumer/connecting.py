"""Open the connections and sessions of a consumer, or let the application's functions open them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg

from outbox_pipelines.core import pooler
from outbox_pipelines.core import session as sessions
from outbox_pipelines.core.secret import check_dsn, register_dsn
from outbox_pipelines.errors import SetupError

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]
_CONNECT_SECONDS: Final = 10


def dsn(conninfo: str, source: str) -> Callable[[], Connection]:
    """Connects to the database of a connection string.

    Behind a pooler nothing is prepared: in transaction mode it would be in another session, or be another
    client's.

    Raises:
        SetupError: it is none.
    """
    _require_dsn(conninfo)

    def connect() -> Connection:
        connection = psycopg.connect(conninfo, **_options(source))
        if pooler.is_between(connection):
            connection.prepare_threshold = None
        connection.execute(sessions.pin(sessions.SHARED))
        return connection

    return connect


def async_dsn(conninfo: str, source: str) -> Callable[[], Awaitable[AsyncConnection]]:
    """The same, asynchronous."""
    _require_dsn(conninfo)

    async def connect() -> AsyncConnection:
        connection = await psycopg.AsyncConnection.connect(conninfo, **_options(source))
        if await pooler.is_between_async(connection):
            connection.prepare_threshold = None
        await connection.execute(sessions.pin(sessions.SHARED))
        return connection

    return connect


def made(thing: Any, kind: type, argument: str) -> Any:
    """Return what an application's function has made, or raise `SetupError` if it is of another kind."""
    if not isinstance(thing, kind):
        package = kind.__module__.partition(".")[0]
        other = type(thing)
        raise SetupError(
            f"{argument} returned a {other.__module__}.{other.__qualname__}: give a function that returns a "
            f"{kind.__name__} of {package}; for other drivers, use session=… with SQLAlchemy"
        )
    return thing


def _require_dsn(conninfo: str) -> None:
    if conninfo:
        register_dsn(conninfo)
        try:
            check_dsn(conninfo)
        except ValueError as error:
            raise SetupError(f"dsn {error}") from None


def _options(source: str) -> dict[str, Any]:
    name = f"consumer {source}"[:63]
    return {
        "autocommit": True,
        "connect_timeout": _CONNECT_SECONDS,
        "fallback_application_name": name,
        **sessions.CONNECTION,
    }
