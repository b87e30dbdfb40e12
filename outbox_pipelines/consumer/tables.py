"""Create and prune the consumer's tables.

Invariants:
- `sql/consumer/` makes them, each file one statement that changes nothing where it has run before.
- What was recorded within `keep` stays, however old its event is; what goes, goes a day at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
from psycopg import sql

from outbox_pipelines.consumer import operator_queries
from outbox_pipelines.core import scripts
from outbox_pipelines.errors import SetupError

# The ring has 64 days. A day is emptied this long after its last event was handled, and has to be before its
# place is used again.
MOST_DAYS: Final = 50
_AT_ONCE: Final = 10_000
_RING: Final = 64
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did."""

    emptied: tuple[str, ...]
    """Partitions."""
    busy: tuple[str, ...]
    """Partitions that were in use; the next call empties them."""
    deleted: int
    """Rows of ids that contain no time."""
    received: int
    """Handled or discarded messages of the inbox."""


def bucket(event_id: UUID | str) -> int:
    """Return the bucket, like `processed_bucket` in sql/consumer.

    Args:
        event_id: as a UUID, or as str() writes one.
    """
    text = str(event_id)
    is_dated = text[14] == "7" and text[19] in "89ab"
    return int(text[:8] + text[9:13], 16) // _DAY_MS % _RING if is_dated else -1


def migrate(connection: psycopg.Connection[Any]) -> None:
    """Create the tables in the first schema of the search_path; existing ones do not change.

    An open transaction includes the change; otherwise the change is committed.

    Raises:
        SetupError: the schema has a table of another shape with a name of the consumer's.
    """
    try:
        with connection.transaction():
            for file in scripts.files("consumer"):
                connection.execute(file.read_bytes())
    except psycopg.errors.RaiseException as error:
        diag = error.diag
        raise SetupError(f"{diag.message_primary}: {diag.message_hint}") from None


def prune(connection: psycopg.Connection[Any], keep: timedelta) -> Pruned:
    """Delete the records of events handled longer than `keep` ago, 1 to 50 days; needs the tables' owner.

    A partition is emptied once everything in it is that old. Only a consumer that handles an event of such an
    old day waits, while its rows are read: up to 0.5 s per million.

    Raises:
        SetupError: `keep` is out of range, or the connection has an open transaction.
    """
    if not timedelta(days=1) <= keep <= timedelta(days=MOST_DAYS):
        raise SetupError(f"keep is {keep}: give 1 to {MOST_DAYS} days")
    if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise SetupError("the connection has an open transaction: commit it first")
    with connection.transaction():
        names = [name for (name,) in _rows(connection, operator_queries.PARTITIONS)]
    emptied, busy = [], []
    for name in names:
        try:
            if _empty(connection, name, keep):
                emptied.append(name)
        except psycopg.errors.LockNotAvailable:
            busy.append(name)
    deleted, received = (
        _delete(connection, query, keep)
        for query in (operator_queries.DELETE_OTHERS, operator_queries.DELETE_RECEIVED)
    )
    return Pruned(tuple(emptied), tuple(busy), deleted, received)


def _empty(connection: psycopg.Connection[Any], name: str, keep: timedelta) -> bool:
    # regclass::text has quoted the name, and qualified it where it must be.
    partition = {"partition": sql.SQL(name)}
    is_over = sql.SQL(operator_queries.IS_OVER).format(**partition)
    with connection.transaction():
        if not _value(connection, is_over, {"keep": keep}):
            return False
    with connection.transaction():
        connection.execute(operator_queries.LOCK_TIMEOUT)
        connection.execute(sql.SQL(operator_queries.LOCK).format(**partition))
        # A consumer can have handled an event of that day since.
        if not _value(connection, is_over, {"keep": keep}):
            return False
        connection.execute(sql.SQL(operator_queries.EMPTY).format(**partition))
        return True


def _delete(connection: psycopg.Connection[Any], query: LiteralString, keep: timedelta) -> int:
    deleted = 0
    while True:
        with connection.transaction():
            now = connection.execute(query, {"keep": keep, "limit": _AT_ONCE}).rowcount
        deleted += now
        if now < _AT_ONCE:
            return deleted


def _rows(connection: psycopg.Connection[Any], query: Any, given: Any = None) -> list[tuple[Any, ...]]:
    """Return rows as tuples, regardless of the connection's row factory."""
    with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        return cursor.execute(query, given).fetchall()


def _value(connection: psycopg.Connection[Any], query: Any, given: Any) -> Any:
    [(value,)] = _rows(connection, query, given)
    return value
