"""Several statements as one message, for psycopg: BEGIN and the first one, the last one and COMMIT.

Invariants:
- A message of several statements has no parameters: the first statement is prepared under a name of SQL, and
  executed with literals that libpq quotes.
- If the session has lost the prepared statement (DEALLOCATE, a pooler), nothing was done: the transaction is
  rolled back, and the statement sent in the usual way.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import errors, generators, pq

from outbox_pipelines.consumer import queries

# With names that show in pg_stat_activity what a session waits for.
_FIRST: Final = {queries.RECORD: "record", queries.RECORD_MANY: "record_many"}
_Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
_IDLE: Final = pq.TransactionStatus.IDLE
_LOST: Final = b"26000"
_THERE: Final = b"42P05"
_FAILED: Final = pq.ExecStatus.FATAL_ERROR
# Where a pooler or a handler takes the statement away again and again, the attempts would cost more.
_MOST_LOSSES: Final = 10


class FirstStatement:
    """For one connection, blocking or not; must be used by one thread or task."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._quote = pq.Escaping(connection.pgconn).escape_literal
        self._prepared: set[str] = set()
        self._losses = 0

    def message(self, query: str, given: Mapping[str, Any]) -> bytes | None:
        """Return BEGIN and a statement as one message; None if the statement must be sent as usual."""
        its = self._connection
        if query not in _FIRST or its.pgconn.transaction_status != _IDLE or self._losses == _MOST_LOSSES:
            return None
        if its.prepare_threshold is None:
            return None
        if any(each is not None for each in (its.isolation_level, its.read_only, its.deferrable)):
            return None
        name, prepare, order = _prepared(query)
        encoding = its.info.encoding
        values = (given[each] for each in order)
        literals = [b"NULL" if it is None else self._quote(str(it).encode(encoding)) for it in values]
        begin = b"BEGIN;" if query in self._prepared else b"BEGIN;" + prepare
        return begin + b"EXECUTE " + name + b"(" + b",".join(literals) + b")"

    def rows(self, query: str, results: Sequence[pq.abc.PGresult]) -> list[tuple[Any, ...]] | None:
        """Return the rows of the message's last statement; None if it must be sent as usual after a rollback.

        Raises:
            psycopg.Error: the statement failed.
        """
        last = results[-1]
        code = last.error_field(pq.DiagnosticField.SQLSTATE)
        if code == _THERE and query not in self._prepared:
            self._prepared.add(query)
        elif code == _LOST and query in self._prepared:
            self._prepared.clear()
            self._losses += 1
        else:
            require_success(self._connection, results)
            self._prepared.add(query)
            loads = psycopg.adapt.Transformer.from_context(self._connection)
            loads.set_pgresult(last)
            return loads.load_rows(0, last.ntuples, tuple)
        return None

    def rolled_back(self) -> None:
        """psycopg removes prepared statements at a rollback."""
        self._prepared.clear()


def send(connection: psycopg.Connection[Any], message: bytes) -> list[pq.abc.PGresult]:
    """Send a message, and return the results of its statements; the last one may be an error."""
    # Not by a cursor, which sends BEGIN separately.
    with connection.lock:
        connection.pgconn.send_query(message)
        return connection.wait(generators.execute(connection.pgconn))


async def send_async(connection: psycopg.AsyncConnection[Any], message: bytes) -> list[pq.abc.PGresult]:
    """As `send`."""
    async with connection.lock:
        connection.pgconn.send_query(message)
        return await connection.wait(generators.execute(connection.pgconn))


def require_success(connection: _Connection, results: Sequence[pq.abc.PGresult]) -> None:
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
