"""The transaction that a handler works in: psycopg's, or that of SQLAlchemy's session.

Invariants:
- It begins before the event is recorded, and is committed only if it is still that one and not aborted: a
  handler that ended it, or passed over an error of the database, fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

import psycopg

from outbox_pipelines.consumer import queries
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

Connection = psycopg.Connection[Any]
# The same numbers in psycopg and psycopg2.
_IDLE: Final = 0
_IN_TRANSACTION: Final = 2
_ENDED: Final = "the handler has ended the transaction: leave commit and rollback to the consumer"
_ABORTED: Final = (
    "a statement of the handler failed and was passed over, so that nothing can be committed: let the error "
    "through, or try the statement in a savepoint"
)


class TransactionError(Exception):
    """The handler left a transaction that cannot be committed."""


class Transactions(Protocol):
    """Where transactions come from; to be used by one thread."""

    def transaction(self) -> AbstractContextManager[Any]:
        """A transaction as handlers get it; committed at the end, rolled back by an exception."""

    def record(self, transaction: Any, event_id: UUID, source: str) -> bool:
        """Whether the event is new to this source; if so it is recorded in the transaction."""

    def close(self) -> None: ...


class Connections:
    """One connection of psycopg for all transactions."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connection = connect()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        connection = self._connection
        if connection.info.transaction_status != _IDLE:
            # Ours would be a savepoint of it, and never committed.
            raise SetupError("the connection has an open transaction: commit it in `connect`")
        with connection.transaction():
            try:
                yield connection
            except psycopg.Rollback:
                # It would roll back and go on as if all were well.
                raise TransactionError(_ENDED) from None
            _require_open(connection.info.transaction_status)

    def record(self, transaction: Connection, event_id: UUID, source: str) -> bool:
        given = {"event_id": str(event_id), "source": source}
        return transaction.execute(queries.RECORD, given).rowcount == 1

    def close(self) -> None:
        self._connection.close()


class Sessions:
    """A session of SQLAlchemy for each transaction."""

    def __init__(self, make: Callable[[], Session]) -> None:
        from sqlalchemy import text

        self._make = make
        self._record = text(re.sub(r"%\((\w+)\)s", r":\1", queries.RECORD))

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with self._make() as session, session.begin() as transaction:
            if getattr(_driver(session), "autocommit", False):
                raise SetupError("the engine commits each statement by itself: give one without AUTOCOMMIT")
            yield session
            if session.get_transaction() is not transaction or not transaction.is_active:
                raise TransactionError(_ENDED)
            session.flush()
            info = getattr(_driver(session), "info", None)
            _require_open(getattr(info, "transaction_status", _IN_TRANSACTION))

    def record(self, transaction: Session, event_id: UUID, source: str) -> bool:
        given = {"event_id": str(event_id), "source": source}
        return transaction.execute(self._record, given).first() is not None

    def close(self) -> None:
        """Nothing is kept: connections belong to the engine."""


def dsn(conninfo: str, source: str) -> Callable[[], Connection]:
    """Connects to the database of a connection string."""

    def connect() -> Connection:
        return psycopg.connect(
            conninfo,
            autocommit=True,
            connect_timeout=10,
            fallback_application_name=f"consumer {source}"[:63],
        )

    return connect


def _driver(session: Session) -> Any:
    return session.connection().connection.dbapi_connection


def _require_open(status: int) -> None:
    """A COMMIT of an aborted transaction is answered like any other, and rolls back."""
    if status != _IN_TRANSACTION:
        raise TransactionError(_ENDED if status == _IDLE else _ABORTED)
