"""The transaction that a handler works in: psycopg's, or that of SQLAlchemy's session, blocking or not.

Invariants:
- It begins before the event is recorded, and is committed only if it is still that one and not aborted: a
  handler that ended it, or passed over an error of the database, fails.
- Those that block have asynchronous methods too, and never wait in them: see `driving`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg

from outbox_pipelines.consumer import messages, queries
from outbox_pipelines.consumer.connecting import AsyncConnection, Connection, made
from outbox_pipelines.consumer.messages import FirstStatement
from outbox_pipelines.core import session as sessions
from outbox_pipelines.core.sqlstates import code_of
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

Rows = list[tuple[Any, ...]]
# The same numbers in psycopg and psycopg2.
_IDLE: Final = 0
_ACTIVE: Final = 1
_IN_TRANSACTION: Final = 2
ENDED: Final = (
    "the handler ended the transaction, or reset its settings (RESET ALL): leave commit and rollback to the "
    "consumer"
)
_ABORTED: Final = (
    "a statement of the handler failed and its error was ignored, so nothing can be committed: let the error "
    "propagate, or run the statement in a savepoint"
)
_OPEN: Final = "the connection has an open transaction: commit it in `connect`"
_LATE: Final = (
    "a statement ran on the connection after its handler had returned: wait in the handler for the threads "
    "and tasks that it starts with the connection, or give them a connection of their own"
)
_AUTOCOMMIT: Final = "the engine commits each statement automatically: give one without AUTOCOMMIT"
_RELEASE_AND_COMMIT: Final = queries.RELEASE_AND_COMMIT.encode()
_CANCEL_SECONDS: Final = 5.0
_IN_FAILED: Final = "25P02"
# Serialization failure and deadlock: the same again may well succeed.
_AGAIN: Final = ("40001", "40P01")


class TransactionError(Exception):
    """The handler left the transaction in a state that cannot be committed."""


class Database(Protocol):
    """Provides transactions; must be used by one thread or task."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Begin the handlers' transaction: commit it at the end, roll it back after an exception."""

    async def rows(self, transaction: Any, query: str, given: Mapping[str, Any]) -> Rows:
        """What a statement of ours returns; a list of texts, numbers, bytes or times is an array."""

    async def require_open(self, transaction: Any) -> None:
        """Raise `TransactionError` if the driver knows that a handler ended or aborted the transaction.

        Nothing is sent to the database.
        """

    async def release(self, transaction: Any) -> bool:
        """Let the transaction be committed, behind the handler; return whether it is still the consumer's.

        Where a driver sends two statements at once, this commits it too.
        """

    @property
    def warnings(self) -> int:
        """How many commits did not wait for a synchronous standby to the end, as far as the driver tells."""

    def abort(self) -> None:
        """Break the connection, so that a wait for an answer ends with an error; from any thread."""

    async def close(self) -> None: ...


class _Listening:
    """Counts the commits that are in one server alone; see `is_canceled_wait`."""

    def __init__(self) -> None:
        self.warnings = 0

    def _hear(self, connection: Any) -> None:
        """Listen to a connection of psycopg or asyncpg, once; others do not tell where a notice is from."""
        if hasattr(connection, "add_notice_handler"):
            with suppress(ValueError):
                connection.remove_notice_handler(self._note)
            connection.add_notice_handler(self._note)
        elif hasattr(connection, "add_log_listener"):
            connection.add_log_listener(self._note_of_asyncpg)

    def _note(self, notice: Any) -> None:
        self.warnings += sessions.is_canceled_wait(notice)

    def _note_of_asyncpg(self, _connection: Any, notice: Any) -> None:
        self._note(notice)


class Connections(_Listening):
    """One connection of psycopg for all transactions; another one where it is lost."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        super().__init__()
        self._connect = connect
        self._connection: Connection | None = None
        self._first: FirstStatement | None = None
        self._is_new = True
        self._is_committed = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        if self._connection is None or self._connection.closed:
            self._connection = made(self._connect(), psycopg.Connection, "connect")
            self._hear(self._connection)
            self._first = FirstStatement(self._connection)
            self._is_new = True
        connection = self._connection
        if connection.pgconn.transaction_status != _IDLE:
            # Ours would be a part of it.
            raise SetupError(_OPEN if self._is_new else _LATE)
        self._is_new = False
        # Also after a ROLLBACK by the handler: otherwise each statement would be committed separately.
        if connection.autocommit:
            connection.autocommit = False
        self._is_committed = False
        try:
            # Not `connection.transaction()`, which sends its COMMIT alone.
            yield connection
            if not self._is_committed:
                _require_open(connection.pgconn.transaction_status)
                connection.commit()
        except psycopg.Rollback:
            raise TransactionError(ENDED) from None
        except TimeoutError:
            _cut(connection)
            raise
        finally:
            if connection.pgconn.transaction_status != _IDLE:
                if self._first is not None:
                    self._first.rolled_back()
                with suppress(psycopg.Error):
                    connection.rollback()
                if connection.pgconn.transaction_status != _IDLE:
                    connection.close()

    async def rows(self, transaction: Connection, query: str, given: Mapping[str, Any]) -> Rows:
        first = self._first
        if first is not None and (message := first.message(query, given)) is not None:
            rows = first.rows(query, messages.send(transaction, message))
            if rows is not None:
                return rows
            transaction.rollback()
        with transaction.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(query.encode(), given)
            return cursor.fetchall() if cursor.description is not None else []

    async def require_open(self, transaction: Connection) -> None:
        _require_open(transaction.pgconn.transaction_status)

    async def release(self, transaction: Connection) -> bool:
        messages.require_success(transaction, messages.send(transaction, _RELEASE_AND_COMMIT))
        self._is_committed = True
        return True

    def abort(self) -> None:
        if self._connection is not None:
            _break(self._connection)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class AsyncConnections(_Listening):
    """The same with an asynchronous connection."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]]) -> None:
        super().__init__()
        self._connect = connect
        self._connection: AsyncConnection | None = None
        self._first: FirstStatement | None = None
        self._is_new = True
        self._is_committed = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        if self._connection is None or self._connection.closed:
            connecting = self._connect()
            opened = await connecting if inspect.isawaitable(connecting) else connecting
            self._connection = made(opened, psycopg.AsyncConnection, "connect")
            self._hear(self._connection)
            self._first = FirstStatement(self._connection)
            self._is_new = True
        connection = self._connection
        if connection.pgconn.transaction_status != _IDLE:
            raise SetupError(_OPEN if self._is_new else _LATE)
        self._is_new = False
        if connection.autocommit:
            await connection.set_autocommit(False)
        self._is_committed = False
        try:
            yield connection
            if not self._is_committed:
                _require_open(connection.pgconn.transaction_status)
                await connection.commit()
        except psycopg.Rollback:
            raise TransactionError(ENDED) from None
        finally:
            if connection.pgconn.transaction_status != _IDLE:
                if self._first is not None:
                    self._first.rolled_back()
                with suppress(psycopg.Error):
                    await connection.rollback()
                if connection.pgconn.transaction_status != _IDLE:
                    await connection.close()

    async def rows(self, transaction: AsyncConnection, query: str, given: Mapping[str, Any]) -> Rows:
        first = self._first
        if first is not None and (message := first.message(query, given)) is not None:
            rows = first.rows(query, await messages.send_async(transaction, message))
            if rows is not None:
                return rows
            await transaction.rollback()
        async with transaction.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(query.encode(), given)
            return await cursor.fetchall() if cursor.description is not None else []

    async def require_open(self, transaction: AsyncConnection) -> None:
        _require_open(transaction.pgconn.transaction_status)

    async def release(self, transaction: AsyncConnection) -> bool:
        messages.require_success(transaction, await messages.send_async(transaction, _RELEASE_AND_COMMIT))
        self._is_committed = True
        return True

    def abort(self) -> None:
        if self._connection is not None:
            _break(self._connection)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class Sessions(_Listening):
    """A session of SQLAlchemy for each transaction."""

    def __init__(self, make: Callable[[], Session]) -> None:
        super().__init__()
        self._make = make
        self._abort: Callable[[], object] | None = None

    def _session(self) -> Session:
        from sqlalchemy.orm import Session

        session: Session = made(self._make(), Session, "session")
        return session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session]:
        with self._session() as session, session.begin() as transaction:
            driver = _driver(session)
            if getattr(driver, "autocommit", False):
                raise SetupError(_AUTOCOMMIT)
            self._abort = partial(_break, driver)
            self._hear(driver)
            try:
                yield session
            except TimeoutError:
                if _cut(_driver(session)):
                    session.invalidate()
                raise
            if session.get_transaction() is not transaction or not transaction.is_active:
                raise TransactionError(ENDED)
            session.flush()
            _require_open(_status(session))

    async def rows(self, transaction: Session, query: str, given: Mapping[str, Any]) -> Rows:
        result: Any = transaction.execute(_text(query), dict(given))
        return [tuple(row) for row in result] if result.returns_rows else []

    async def require_open(self, transaction: Session) -> None:
        _require_open(_status(transaction))

    async def release(self, transaction: Session) -> bool:
        return await released(self, transaction)

    def abort(self) -> None:
        if self._abort is not None:
            self._abort()

    async def close(self) -> None:
        """Nothing is kept: connections belong to the engine."""


class AsyncSessions(_Listening):
    """The same with an asynchronous session."""

    def __init__(self, make: Callable[[], AsyncSession]) -> None:
        super().__init__()
        self._make = make
        self._abort: Callable[[], object] | None = None

    def _session(self) -> AsyncSession:
        from sqlalchemy.ext.asyncio import AsyncSession

        session: AsyncSession = made(self._make(), AsyncSession, "session")
        return session

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        async with self._session() as session, session.begin() as transaction:
            driver = await session.run_sync(_driver)
            if getattr(driver, "autocommit", False):
                raise SetupError(_AUTOCOMMIT)
            loop = asyncio.get_running_loop()
            self._abort = partial(loop.call_soon_threadsafe, _break, driver.driver_connection)
            self._hear(driver.driver_connection)
            yield session
            if session.get_transaction() is not transaction or not transaction.is_active:
                raise TransactionError(ENDED)
            await session.flush()
            _require_open(await session.run_sync(_status))

    async def rows(self, transaction: AsyncSession, query: str, given: Mapping[str, Any]) -> Rows:
        result: Any = await transaction.execute(_text(query), dict(given))
        return [tuple(row) for row in result] if result.returns_rows else []

    async def require_open(self, transaction: AsyncSession) -> None:
        _require_open(await transaction.run_sync(_status))

    async def release(self, transaction: AsyncSession) -> bool:
        return await released(self, transaction)

    def abort(self) -> None:
        if self._abort is not None:
            self._abort()

    async def close(self) -> None:
        """Nothing is kept: connections belong to the engine."""


async def released(database: Database, transaction: Any) -> bool:
    """Let a transaction be committed, which is done by other means."""
    [(is_ours,)] = await database.rows(transaction, queries.RELEASE, {})
    return bool(is_ours)


def is_worth_a_repetition(error: BaseException) -> bool:
    """Return whether an error is a serialization failure or a deadlock."""
    return code_of(error) in _AGAIN


def left_over(error: BaseException) -> TransactionError | None:
    """What the handler has done to the transaction, by what the statement behind it was refused with."""
    names = {each.__name__ for each in type(error).__mro__}
    # SQLAlchemy itself rejects statements after a failed flush, a commit or a rollback.
    if queries.NOT_OURS in str(error):
        return TransactionError(ENDED)
    if code_of(error) == _IN_FAILED or "PendingRollbackError" in names:
        return TransactionError(_ABORTED)
    return TransactionError(ENDED) if "InvalidRequestError" in names else None


def _text(query: str) -> Any:
    from sqlalchemy import text

    return text(re.sub(r"%\((\w+)\)s", r":\1", query))


def _driver(session: Session) -> Any:
    return session.connection().connection.dbapi_connection


def _cut(driver: Any) -> bool:
    """Ends the statement that a connection of psycopg was interrupted in: a rollback would wait for it.

    Returns:
        Whether there was one; the connection is closed then.
    """
    if not isinstance(driver, psycopg.Connection) or driver.info.transaction_status != _ACTIVE:
        return False
    # Without it the server goes on with the statement, and keeps the event from others.
    with suppress(psycopg.Error):
        driver.cancel_safe(timeout=_CANCEL_SECONDS)
    driver.close()
    return True


def _break(driver: Any) -> None:
    """End a connection without a word to the server, whatever waits for it.

    Not `close`, which another thread must not call: the one that waits sees the end of its socket.
    """
    if (terminate := getattr(driver, "terminate", None)) is not None:
        # asyncpg, which is called in its own thread.
        terminate()
        return
    # Also of a driver that is unknown, or closed.
    with suppress(Exception), closing(socket.socket(fileno=os.dup(driver.fileno()))) as its:
        its.shutdown(socket.SHUT_RDWR)


def _status(session: Session) -> int:
    """As psycopg's number: that of an open transaction where the driver does not tell."""
    if not session.in_transaction():
        return _IDLE
    driver = _driver(session)
    status: int | None = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is None:
        # asyncpg does not tell an aborted one.
        is_open = getattr(getattr(driver, "driver_connection", None), "is_in_transaction", None)
        status = _IN_TRANSACTION if is_open is None or is_open() else _IDLE
    return status


def _require_open(status: int) -> None:
    """A COMMIT of an aborted transaction is answered like any other, and rolls back."""
    if status != _IN_TRANSACTION:
        raise TransactionError(ENDED if status == _IDLE else _ABORTED)
