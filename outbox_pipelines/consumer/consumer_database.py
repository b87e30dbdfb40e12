"""The transaction that a handler works in: psycopg's, or that of SQLAlchemy's session, blocking or not.

Invariants:
- It begins before the event is recorded, and is committed only if it is still that one and not aborted: a
  handler that ended it, or passed over an error of the database, fails.
- Those that block have asynchronous methods too, and never wait in them: see `drive`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, closing, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.core import session as sessions
from outbox_pipelines.core.outages import code_of
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    pass

Rows = list[tuple[Any, ...]]
Statement = tuple[str, Mapping[str, Any]]
"""A query and what is given."""
# The same numbers in psycopg and psycopg2.
IDLE: Final = 0
ACTIVE: Final = 1
IN_TRANSACTION: Final = 2
ENDED: Final = (
    "the handler ended the transaction, or reset its settings (RESET ALL): leave commit and rollback to the "
    "consumer"
)
_ABORTED: Final = (
    "a statement of the handler failed and its error was ignored, so nothing can be committed: let the error "
    "propagate, or run the statement in a savepoint"
)
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

    async def end_handling(self, transaction: Any, following: Statement | None = None) -> bool:
        """Let the transaction be committed, behind the handler; return whether it is still the consumer's.

        Where a driver sends several statements at once, this commits it too, and begins the next transaction
        with the statement that is expected to follow. Any other statement, and `close`, roll that back.
        """

    @property
    def warnings(self) -> int:
        """How many commits did not wait for a synchronous standby to the end, as far as the driver tells."""

    def abort(self) -> None:
        """Break the connection, so that a wait for an answer ends with an error; from any thread."""

    async def close(self) -> None: ...


class Listening:
    """Counts the commits that are in one server alone; see `is_canceled_wait`."""

    def __init__(self) -> None:
        self.warnings = 0

    def hear(self, connection: Any) -> None:
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


async def end_handling(database: Database, transaction: Any) -> bool:
    """Let a transaction be committed, which is done by other means."""
    [(is_ours,)] = await database.rows(transaction, queries.END_HANDLING, {})
    return bool(is_ours)


def is_worth_a_repetition(error: BaseException) -> bool:
    """Return whether an error is a serialization failure or a deadlock."""
    return code_of(error) in _AGAIN


def left_over(error: BaseException) -> TransactionError | None:
    """What the handler has done to the transaction, by what the statement behind it was refused with."""
    names = {each.__name__ for each in type(error).__mro__}
    # SQLAlchemy itself rejects statements after a failed flush, a commit or a rollback.
    if code_of(error) == _IN_FAILED or "PendingRollbackError" in names:
        return TransactionError(_ABORTED)
    return TransactionError(ENDED) if "InvalidRequestError" in names else None


def cut_off(driver: Any) -> bool:
    """Ends the statement that a connection of psycopg was interrupted in: a rollback would wait for it.

    Returns:
        Whether there was one; the connection is closed then.
    """
    if not isinstance(driver, psycopg.Connection) or driver.info.transaction_status != ACTIVE:
        return False
    # Without it the server goes on with the statement, and keeps the event from others.
    with suppress(psycopg.Error):
        driver.cancel_safe(timeout=_CANCEL_SECONDS)
    driver.close()
    return True


def break_off(driver: Any) -> None:
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


def check_open(status: int) -> None:
    """A COMMIT of an aborted transaction is answered like any other, and rolls back."""
    if status != IN_TRANSACTION:
        raise TransactionError(ENDED if status == IDLE else _ABORTED)
