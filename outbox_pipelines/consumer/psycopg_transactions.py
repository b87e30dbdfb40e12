"""Transactions of psycopg, blocking or not: how a consumer connects, begins and commits.

Several statements are one message: BEGIN and the first one, the last one and COMMIT, and behind it BEGIN and
the first one of the next transaction, if it is known.

Invariants:
- A transaction that was begun behind a commit is used for that statement, or rolled back. If the server has
  sent something since, it may have ended the session: a handler must not be the first to notice that.
- A message of several statements has no parameters: the first statement is prepared under a name of SQL, and
  executed with literals that libpq quotes.
- If the session has lost the prepared statement (DEALLOCATE, a pooler), nothing was done: the transaction is
  rolled back, and the statement sent in the usual way.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import errors, generators, pq

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.consumer_database import (
    ENDED,
    IDLE,
    Listening,
    Rows,
    Statement,
    TransactionError,
    break_off,
    check_open,
    cut_off,
    made,
)
from outbox_pipelines.core import session
from outbox_pipelines.core import session as sessions
from outbox_pipelines.core.secret import check_dsn, register_dsn
from outbox_pipelines.errors import SetupError

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]
_CONNECT_SECONDS: Final = 10
# With names that show in pg_stat_activity what a session waits for.
_FIRST: Final = {queries.RECORD: "record", queries.RECORD_MANY: "record_many"}
_AnyConnection = Connection | AsyncConnection
_LOST: Final = "26000"
_THERE: Final = "42P05"
_FAILED: Final = pq.ExecStatus.FATAL_ERROR
# Where a pooler or a handler takes the statement away again and again, the attempts would cost more.
_MOST_LOSSES: Final = 10
_OPEN: Final = "the connection has an open transaction: commit it in `connect`"
_LATE: Final = (
    "a statement ran on the connection after its handler had returned: wait in the handler for the threads "
    "and tasks that it starts with the connection, or give them a connection of their own"
)
_END_HANDLING_AND_COMMIT: Final = queries.END_HANDLING_AND_COMMIT.encode()
# How many results it has.
_COMMITTED: Final = 2


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
        if session.is_behind_pooler(connection):
            connection.prepare_threshold = None
        connection.execute(sessions.pin(sessions.SHARED))
        return connection

    return connect


def async_dsn(conninfo: str, source: str) -> Callable[[], Awaitable[AsyncConnection]]:
    """The same, asynchronous."""
    _require_dsn(conninfo)

    async def connect() -> AsyncConnection:
        connection = await psycopg.AsyncConnection.connect(conninfo, **_options(source))
        if await session.is_behind_pooler_async(connection):
            connection.prepare_threshold = None
        await connection.execute(sessions.pin(sessions.SHARED))
        return connection

    return connect


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


class _Begun(NamedTuple):
    query: str
    given: Mapping[str, Any]
    rows: Rows


class Connections(Listening):
    """One connection of psycopg, blocking or not, for all transactions; another one where it is lost."""

    def __init__(
        self,
        connect: Callable[[], Connection | Awaitable[AsyncConnection]],
        kind: type = psycopg.Connection,
    ) -> None:
        super().__init__()
        self._connect = connect
        self._kind = kind
        self._connection: Any = None
        self._first: FirstStatement | None = None
        self._is_new = True
        self._is_committed = False
        self._begun: _Begun | None = None
        """What the open transaction began with, behind the last commit."""
        self._answer: _Begun | None = None
        """The same, in that transaction, until its first statement."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        if self._begun is not None and not self._connection.closed and _has_news(self._connection):
            self._begun = None
            await self._roll_back(self._connection)
        if self._connection is None or self._connection.closed:
            opened = self._connect()
            if self._kind is psycopg.AsyncConnection:
                opened = await _done(opened)
            self._connection = made(opened, self._kind, "connect")
            self.hear(self._connection)
            self._first = FirstStatement(self._connection)
            self._is_new = True
            self._begun = None
        connection = self._connection
        self._answer, self._begun = self._begun, None
        if self._answer is None and connection.pgconn.transaction_status != IDLE:
            # Ours would be a part of it.
            raise SetupError(_OPEN if self._is_new else _LATE)
        self._is_new = False
        # Also after a ROLLBACK by the handler: otherwise each statement would be committed separately.
        if connection.autocommit:
            await _done(connection.set_autocommit(False))
        self._is_committed = False
        try:
            # Not `connection.transaction()`, which sends its COMMIT alone.
            yield connection
            if not self._is_committed:
                check_open(connection.pgconn.transaction_status)
                await _done(connection.commit())
        except psycopg.Rollback:
            raise TransactionError(ENDED) from None
        except TimeoutError:
            cut_off(connection)
            raise
        finally:
            if self._begun is None and connection.pgconn.transaction_status != IDLE:
                await self._roll_back(connection)

    async def _roll_back(self, connection: _AnyConnection) -> None:
        if self._first is not None:
            self._first.rolled_back()
        with suppress(psycopg.Error):
            await _done(connection.rollback())
        if connection.pgconn.transaction_status != IDLE:
            await _done(connection.close())

    async def rows(self, transaction: Any, query: str, given: Mapping[str, Any]) -> Rows:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            if (answer.query, answer.given) == (query, given):
                return answer.rows
            await self._roll_back(transaction)
        first = self._first
        if first is not None and (message := first.message(query, given)) is not None:
            rows = first.rows(query, await _send(transaction, message))
            if rows is not None:
                return rows
            await _done(transaction.rollback())
        cursor = transaction.cursor(row_factory=psycopg.rows.tuple_row)
        await _done(cursor.execute(query.encode(), given))
        found: Rows = await _done(cursor.fetchall()) if cursor.description is not None else []
        return found

    async def require_open(self, transaction: Any) -> None:
        check_open(transaction.pgconn.transaction_status)

    async def end_handling(self, transaction: Any, following: Statement | None = None) -> bool:
        assert self._first is not None
        message = rows = None
        if following is not None:
            # A text that cannot be sent, and any other error of that statement, are reported by its own
            # transaction, when it is sent again.
            with suppress(psycopg.Error, ValueError):
                message = self._first.message(*following)
        sent = _END_HANDLING_AND_COMMIT if message is None else _END_HANDLING_AND_COMMIT + b";" + message
        results = await _send(transaction, sent)
        if _code(results[0]) in queries.NOT_OURS:
            return False
        _require_success(transaction, results[:_COMMITTED])
        self._is_committed = True
        if following is not None and message is not None:
            with suppress(psycopg.Error):
                rows = self._first.rows(following[0], results[_COMMITTED:])
            if rows is None:
                await self._roll_back(transaction)
            else:
                self._begun = _Begun(*following, rows)
        return True

    def abort(self) -> None:
        if self._connection is not None:
            break_off(self._connection)

    async def close(self) -> None:
        if self._connection is not None:
            await _done(self._connection.close())


async def _done(result: Any) -> Any:
    """Return the result of a call that blocked, or of one to be awaited."""
    return await result if inspect.isawaitable(result) else result


class FirstStatement:
    """For one connection, blocking or not; must be used by one thread or task."""

    def __init__(self, connection: _AnyConnection) -> None:
        self._connection = connection
        self._quote = pq.Escaping(connection.pgconn).escape_literal
        self._prepared: set[str] = set()
        self._losses = 0

    def message(self, query: str, given: Mapping[str, Any]) -> bytes | None:
        """Return BEGIN and a statement as one message; None if the statement must be sent as usual.

        The statements of `_FIRST` are always the first of a transaction.
        """
        its = self._connection
        if query not in _FIRST or self._losses == _MOST_LOSSES:
            return None
        if its.prepare_threshold is None:
            return None
        if any(each is not None for each in (its.isolation_level, its.read_only, its.deferrable)):
            return None
        name, prepare, order = _prepared(query)
        literals = [b"NULL" if given[it] is None else self._literal(str(given[it])) for it in order]
        begin = b"BEGIN;" if query in self._prepared else b"BEGIN;" + prepare
        return begin + b"EXECUTE " + name + b"(" + b",".join(literals) + b")"

    def _literal(self, text: str) -> bytes:
        # A handler can change the encoding; to ask for it takes longer than to encode.
        encoding = "ascii" if text.isascii() else self._connection.info.encoding
        return self._quote(text.encode(encoding))

    def rows(self, query: str, results: Sequence[pq.abc.PGresult]) -> list[tuple[Any, ...]] | None:
        """Return the rows of the message's last statement; None if it must be sent as usual after a rollback.

        Raises:
            psycopg.Error: the statement failed.
        """
        last = results[-1]
        code = _code(last)
        if code == _THERE and query not in self._prepared:
            self._prepared.add(query)
        elif code == _LOST and query in self._prepared:
            self._prepared.clear()
            self._losses += 1
        else:
            _require_success(self._connection, results)
            self._prepared.add(query)
            loads = psycopg.adapt.Transformer.from_context(self._connection)
            loads.set_pgresult(last)
            return loads.load_rows(0, last.ntuples, tuple)
        return None

    def rolled_back(self) -> None:
        """psycopg removes prepared statements at a rollback."""
        self._prepared.clear()


def _has_news(connection: _AnyConnection) -> bool:
    """Return whether the server has sent or ended something that is not read yet."""
    # Not by `select.select`, which refuses the numbers of sockets in a process with many.
    news = select.poll()
    news.register(connection.pgconn.socket, select.POLLIN)
    return bool(news.poll(0))


async def _send(connection: _AnyConnection, message: bytes) -> list[pq.abc.PGresult]:
    """Send a message, and return the results of its statements; the last one may be an error."""
    # Not by a cursor, which sends BEGIN separately.
    if isinstance(connection, psycopg.Connection):
        with connection.lock:
            connection.pgconn.send_query(message)
            return connection.wait(generators.execute(connection.pgconn))
    async with connection.lock:
        connection.pgconn.send_query(message)
        return await connection.wait(generators.execute(connection.pgconn))


def _code(result: pq.abc.PGresult) -> str:
    """Return the SQLSTATE of a result; empty if it is no error."""
    return (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()


def _require_success(connection: _AnyConnection, results: Sequence[pq.abc.PGresult]) -> None:
    """Raise psycopg's error if a message failed; no statement behind the one that failed was executed."""
    if results[-1].status == _FAILED:
        raise errors.error_from_result(results[-1], encoding=connection.info.encoding)


@functools.cache
def _prepared(query: str) -> tuple[bytes, bytes, Sequence[str]]:
    """Return the name of a statement, what prepares it, and its parameters in order."""
    order: dict[str, int] = {}
    text = re.sub(r"%\((\w+)\)s", lambda found: f"${order.setdefault(found[1], len(order) + 1)}", query)
    # Another version's statement, in a session that a pooler has given to both, has another name.
    name = f"outbox_{_FIRST[query]}_{hashlib.sha256(text.encode()).hexdigest()[:16]}".encode()
    return name, b"PREPARE " + name + b" AS " + text.encode() + b";", tuple(order)
