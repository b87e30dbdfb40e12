"""Transactions of SQLAlchemy's sessions, blocking or not, with any driver."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.consumer.consumer_database import (
    ENDED,
    IDLE,
    IN_TRANSACTION,
    Listening,
    Rows,
    Statement,
    TransactionError,
    break_off,
    check_open,
    cut_off,
    end_handling,
    made,
)
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

_AUTOCOMMIT: Final = "the engine commits each statement automatically: give one without AUTOCOMMIT"


class Sessions(Listening):
    """A session of SQLAlchemy for each transaction."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make
        self._abort: Callable[[], object] | None = None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        from sqlalchemy.orm import Session

        made_session: Session = made(self._make(), Session, "session")
        with made_session as session, session.begin() as transaction:
            driver = _driver(session)
            if getattr(driver, "autocommit", False):
                raise SetupError(_AUTOCOMMIT)
            self._abort = partial(break_off, driver)
            self.hear(driver)
            try:
                yield session
            except TimeoutError:
                if cut_off(_driver(session)):
                    session.invalidate()
                raise
            if session.get_transaction() is not transaction or not transaction.is_active:
                raise TransactionError(ENDED)
            session.flush()
            check_open(_status(session))

    async def rows(self, transaction: Any, query: str, given: Mapping[str, Any]) -> Rows:
        result: Any = transaction.execute(_text(query), dict(given))
        return [tuple(row) for row in result] if result.returns_rows else []

    async def require_open(self, transaction: Any) -> None:
        check_open(_status(transaction))

    async def end_handling(self, transaction: Any, following: Statement | None = None) -> bool:
        return await end_handling(self, transaction)

    def abort(self) -> None:
        if self._abort is not None:
            self._abort()

    async def close(self) -> None:
        """Nothing is kept: connections belong to the engine."""


class AsyncSessions(Sessions):
    """The same with an asynchronous session."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        from sqlalchemy.ext.asyncio import AsyncSession

        made_session: AsyncSession = made(self._make(), AsyncSession, "session")
        async with made_session as session, session.begin() as transaction:
            driver = await session.run_sync(_driver)
            if getattr(driver, "autocommit", False):
                raise SetupError(_AUTOCOMMIT)
            loop = asyncio.get_running_loop()
            self._abort = partial(loop.call_soon_threadsafe, break_off, driver.driver_connection)
            self.hear(driver.driver_connection)
            yield session
            if session.get_transaction() is not transaction or not transaction.is_active:
                raise TransactionError(ENDED)
            await session.flush()
            check_open(await session.run_sync(_status))

    async def rows(self, transaction: Any, query: str, given: Mapping[str, Any]) -> Rows:
        result: Any = await transaction.execute(_text(query), dict(given))
        return [tuple(row) for row in result] if result.returns_rows else []

    async def require_open(self, transaction: Any) -> None:
        check_open(await transaction.run_sync(_status))


def _text(query: str) -> Any:
    from sqlalchemy import text

    return text(re.sub(r"%\((\w+)\)s", r":\1", query))


def _driver(session: Session) -> Any:
    return session.connection().connection.dbapi_connection


def _status(session: Session) -> int:
    """As psycopg's number: that of an open transaction where the driver does not tell."""
    if not session.in_transaction():
        return IDLE
    driver = _driver(session)
    status: int | None = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is None:
        # asyncpg does not tell an aborted one.
        is_open = getattr(getattr(driver, "driver_connection", None), "is_in_transaction", None)
        status = IN_TRANSACTION if is_open is None or is_open() else IDLE
    return status
