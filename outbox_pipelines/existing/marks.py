"""Marks published rows, and checks before publishing that the table allows it.

Invariants:
- Every relay that starts publishes a row again that cannot be marked. So the mark is tried, and rolled back,
  before the first rows are published. If a mark fails later, nothing more is published.
- If one row cannot be marked, the other rows are still marked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.sqlstates import is_outage
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import queries
from outbox_pipelines.existing.core.ports import MarkError
from outbox_pipelines.existing.statements import Statements

_LOG = logging.getLogger(__name__)
# The search for rows that cannot be marked stops at this number: more are not a problem of single rows.
_MOST_BROKEN: Final = 20
# Otherwise a deferred constraint or trigger would raise its error only at the commit.
_NOW: Final = "SET CONSTRAINTS ALL IMMEDIATE"
_LOOK: Final = "look for a trigger, a rule or a policy that prevents or undoes the UPDATE"


_WRITTEN: Final = (
    "published_at",
    "status",
    "processed_at",
    "retry_count",
    "last_error",
    "next_attempt_at",
    "failed_at",
)


@contextmanager
def explained(table: Mapping) -> Iterator[None]:
    """Raise the database's error about an UPDATE as a `MarkError`."""
    try:
        yield
    except psycopg.DatabaseError as error:
        if is_outage(error):
            raise
        raise MarkError(_explain(table, error)) from error


def rehearse(connection: Connection, statements: Statements, table: Mapping, seqs: list[int]) -> None:
    """Mark rows in the open transaction, and roll the mark back.

    Raises:
        MarkError: the table does not allow these rows to be marked.
    """
    with connection.transaction(force_rollback=True), explained(table):
        connection.execute(statements(queries.MARK), {"keys": statements.keys.array(seqs)})
        connection.execute(_NOW)
        if left := _unmarked(connection, statements, seqs):
            raise MarkError(
                f"{table} does not allow {left} of {len(seqs)} rows to be marked, so nothing is "
                f"published: {_LOOK}"
            )


def mark(connection: Connection, statements: Statements, table: Mapping, seqs: list[int]) -> None:
    """Mark published rows in the open transaction; log a warning if rows are missing. Call in `explained`.

    Raises:
        MarkError: the table does not allow all of them to be marked.
        SetupError: several rows have the same key.
    """
    marked = connection.execute(statements(queries.MARK), {"keys": statements.keys.array(seqs)}).rowcount
    if marked == len(seqs):
        return
    key = table.columns["seq" if table.order == "seq" else "id"]
    left = _unmarked(connection, statements, seqs)
    if marked > len(seqs):
        raise SetupError(
            f"{key!r} is not unique in {table}: {len(seqs)} events have {marked} rows. Give each row its own"
        )
    if left:
        raise MarkError(f"{table} does not allow {left} published rows to be marked: {_LOOK}")
    _LOG.warning(
        "%d published events are no longer in %s, or another session has marked them: check for deleted "
        "rows, a detached partition, or another publisher",
        *(len(seqs) - marked, table),
    )


def _unmarked(connection: Connection, statements: Statements, seqs: list[int]) -> int:
    """Return how many of these are still pending: the others were deleted, or marked by another session."""
    ((left,),) = connection.execute(
        statements(queries.UNMARKED), {"keys": statements.keys.array(seqs)}
    ).fetchall()
    return int(left)


def mark_what_can_be(connection: Connection, statements: Statements, seqs: list[int]) -> None:
    """Mark those of the rows that can be marked, in the open transaction."""
    broken = 0
    left = [seqs]
    while left and broken < _MOST_BROKEN:
        some = left.pop()
        try:
            with connection.transaction():
                connection.execute(statements(queries.MARK), {"keys": statements.keys.array(some)})
                connection.execute(_NOW)
        except psycopg.DatabaseError as error:
            if is_outage(error):
                raise
            middle = len(some) // 2
            if middle:
                left += [some[middle:], some[:middle]]
            else:
                broken += 1


def _explain(table: Mapping, error: psycopg.DatabaseError) -> str:
    diagnosis = error.diag
    said = diagnosis.message_primary or first_line(error)
    if diagnosis.constraint_name:
        remedy = f"change constraint {diagnosis.constraint_name} of {diagnosis.table_name or table}"
    elif isinstance(error, psycopg.errors.InsufficientPrivilege):
        columns = ", ".join(table.columns[name] for name in _WRITTEN if name in table.columns)
        remedy = f"GRANT UPDATE ({columns}) ON {table} to the relay's role, and what its triggers need"
    else:
        where = (diagnosis.context or "").splitlines()
        remedy = "change what rejects the UPDATE" + (f" ({where[0]})" if where else "")
    return (
        f"{table} does not allow rows to be marked as published, so nothing more is published: {said}: "
        f"{remedy}, then start the relay again"
    )
