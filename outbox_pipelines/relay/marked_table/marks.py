"""Marks published rows, and finds out before publishing whether the table lets them be marked.

Invariants:
- A row that cannot be marked is published again by every relay that starts. So the mark is tried, and rolled
  back, before the first rows are published; and when one fails later, nothing more is published.
- Rows beside the one that cannot be marked are marked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.parsers.table_mapping import Mapping
from outbox_pipelines.relay.marked_table import queries
from outbox_pipelines.relay.marked_table.core.ports import MarkError
from outbox_pipelines.relay.marked_table.queries import Statements
from outbox_pipelines.secret import first_line

_LOG = logging.getLogger(__name__)
# So many rows are looked for that cannot be marked: more of them are no matter of single rows.
_MOST_BROKEN: Final = 20
# A constraint or a trigger that is deferred would else speak at the commit.
_NOW: Final = "SET CONSTRAINTS ALL IMMEDIATE"


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
    """Raises what the database says against an UPDATE as a `MarkError`."""
    try:
        yield
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:
        raise MarkError(_explain(table, error)) from error


def rehearse(connection: Connection, statements: Statements, table: Mapping, seqs: list[int]) -> None:
    """Marks rows in the open transaction, and takes it back.

    Raises:
        MarkError: the table does not let them be marked.
    """
    with connection.transaction(force_rollback=True), explained(table):
        marked = connection.execute(statements(queries.MARK), {"seqs": array(seqs)}).rowcount
        connection.execute(_NOW)
        left = len(seqs) - marked
        if left > 0 and (left := _unmarked(connection, statements, seqs)):
            raise MarkError(
                f"{table} does not let {left} of {len(seqs)} rows be marked, so nothing is "
                "published: look for a trigger, a rule or a policy that stops UPDATE"
            )


def mark(connection: Connection, statements: Statements, table: Mapping, seqs: list[int]) -> None:
    """Marks published rows in the open transaction; if their count differs, says so. Within `explained`.

    Raises:
        MarkError: the table does not let all of them be marked.
        SetupError: a number has several rows.
    """
    marked = connection.execute(statements(queries.MARK), {"seqs": array(seqs)}).rowcount
    if marked == len(seqs):
        return
    left = _unmarked(connection, statements, seqs)
    if marked > len(seqs):
        raise SetupError(
            f"{table.columns['seq']!r} is not unique in {table}: {len(seqs)} events have {marked} rows; "
            "give each row its own number"
        )
    if left:
        raise MarkError(
            f"{table} does not let {left} published rows be marked: look for a trigger, a rule or a policy "
            "that stops UPDATE"
        )
    _LOG.warning(
        "%d published events are not in %s any more, or were marked by another session: rows deleted, a "
        "partition detached, or another publisher?",
        *(len(seqs) - marked, table),
    )


def _unmarked(connection: Connection, statements: Statements, seqs: list[int]) -> int:
    """How many of these are still pending: the others were deleted, or marked by another session."""
    ((left,),) = connection.execute(statements(queries.UNMARKED), {"seqs": array(seqs)}).fetchall()
    return int(left)


def mark_what_can_be(connection: Connection, statements: Statements, seqs: list[int]) -> None:
    """Marks those of the rows that let themselves be marked, in the open transaction."""
    broken = 0
    left = [seqs]
    while left and broken < _MOST_BROKEN:
        some = left.pop()
        try:
            with connection.transaction():
                connection.execute(statements(queries.MARK), {"seqs": array(some)})
                connection.execute(_NOW)
        except psycopg.OperationalError:
            raise
        except psycopg.DatabaseError:
            middle = len(some) // 2
            if middle:
                left += [some[middle:], some[:middle]]
            else:
                broken += 1


def array(numbers: Iterable[int]) -> str:
    """As PostgreSQL writes one: adapting a list of thousands takes longer than marking them."""
    return "{" + ",".join(map(str, numbers)) + "}"


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
        remedy = "change what refuses it" + (f" ({where[0]})" if where else "")
    return (
        f"{table} does not let rows be marked as published, so nothing more is published: {said}: {remedy}, "
        "then start the relay again"
    )
