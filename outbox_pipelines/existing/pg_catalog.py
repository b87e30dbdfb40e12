"""What `pg_catalog` says about a table: the relation, its columns, and what a CHECK allows.

Invariants:
- Lookups are by name, and report a relation that the role may not use.
- A domain counts as its base type.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.existing import existing_sql

_WHOLE: Final = frozenset({"int2", "int4", "int8"})
TEXT: Final = frozenset({"text", "varchar", "bpchar", "citext", "name"})
_WORD: Final = TEXT | _WHOLE | {"uuid", "numeric"}
_JSON: Final = frozenset({"json", "jsonb"})
_TIME: Final = frozenset({"timestamptz", "timestamp"})
_ENUM: Final = "enum"

# The types that a column may have, and the usual one.
KINDS: Final[dict[str, tuple[frozenset[str], str]]] = {
    "id": (_WORD, "uuid"),
    "seq": (_WHOLE, "bigint"),
    "aggregate_type": (_WORD | {_ENUM}, "text"),
    "aggregate_id": (_WORD, "text"),
    "event_type": (_WORD | {_ENUM}, "text"),
    "payload": (_JSON | TEXT, "jsonb"),
    "created_at": (_TIME, "timestamptz"),
    "headers": (_JSON, "jsonb"),
    "idempotency_key": (_WORD, "text"),
    "correlation_id": (_WORD, "text"),
    "causation_id": (_WORD, "text"),
    "traceparent": (_WORD, "text"),
    "trace_id": (_WORD, "text"),
    "version": (_WORD, "int"),
    "published_at": (_TIME, "timestamptz"),
    "status": (TEXT | _WHOLE | {_ENUM}, "text"),
    "processed_at": (_TIME, "timestamptz"),
    "failed_at": (_TIME, "timestamptz"),
    "retry_count": (_WHOLE, "int"),
    "last_error": (TEXT, "text"),
    "next_attempt_at": (_TIME, "timestamptz"),
}

# NULL in a pending row, or set to NULL by the relay.
NULLED: Final = ("published_at", "failed_at", "next_attempt_at")


class Relation(NamedTuple):
    """A relation, as `pg_catalog` describes it to this role."""

    oid: int
    kind: str
    schema: str
    name: str
    spelled: str
    """Its name with the schema, as SQL."""
    root: str | None
    """The partitioned table that it is a partition of, as SQL."""
    may_use: bool
    may_read: bool
    may_write: bool
    is_filtered: bool
    user: str
    """As SQL."""


class Column(NamedTuple):
    """A column of a table; a domain counts as its base type."""

    name: str
    type: str
    kind: str
    spelled: str
    qualified: str
    """The type with its schema, for statements that other sessions run."""
    declared: str
    never_null: bool
    default: str | None
    """As SQL."""
    is_counted: bool
    """Whether the database counts it: an identity, or a default from a sequence."""
    is_unique: bool
    """Whether it is unique on its own, at least among some rows such as the pending ones."""
    may_write: bool
    labels: list[str]

    @property
    def is_a(self) -> str:
        """The type, or `enum`."""
        return _ENUM if self.kind == "e" else self.type

    @property
    def is_distinct(self) -> bool:
        """Whether no two rows have the same value: by a sequence, by an index, or as UUIDs have by nature."""
        return self.is_counted or self.is_unique or self.type == "uuid"

    @property
    def is_whole(self) -> bool:
        """Whether its values are integers."""
        return self.type in _WHOLE

    @property
    def is_text(self) -> bool:
        """Whether its values are words: a text or an enum."""
        return self.is_a in TEXT | {_ENUM}

    def can_be(self, ours: str) -> bool:
        """Return whether the type is one that this entry of [table.columns] allows."""
        return self.is_a in KINDS[ours][0]


def look_up(connection: Connection, schema: str | None, name: str) -> Relation | None:
    """Return the relation of this name; without a schema, the one in OUTBOX_SCHEMA."""
    row = connection.execute(existing_sql.TABLE, {"schema": schema, "table": name}).fetchone()
    return None if row is None else Relation(*row)


def read_columns(connection: Connection, oid: int) -> dict[str, Column]:
    """Return the columns of a table by their names, in their order."""
    rows = connection.execute(existing_sql.COLUMNS, {"oid": oid}).fetchall()
    return {row[0]: Column(*row) for row in rows}


def elsewhere(connection: Connection, name: str) -> list[str]:
    """Return tables of this name in all schemas, in upper and lower case."""
    return [found for (found,) in connection.execute(existing_sql.ELSEWHERE, {"table": name}).fetchall()]


def allows(connection: Connection, column: Column, condition: str, value: str) -> bool:
    """Return whether a CHECK constraint of one column allows a value in it."""
    query = sql.SQL("SELECT ({condition}) IS NOT FALSE FROM (SELECT {value}::{type} AS {column}) AS row")
    try:
        row = connection.execute(
            query.format(
                condition=sql.SQL(condition),
                value=sql.Literal(value),
                type=sql.SQL(column.spelled),
                column=sql.Identifier(column.name),
            )
        ).fetchone()
    except psycopg.errors.DataError:
        return False
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.RaiseException):
        # A condition that calls a function: a mark is tried before the first event is published.
        return True
    return row == (True,)


def occurring(connection: Connection, relation: Relation, column: Column) -> list[str]:
    """Return values of a column that are cheap to know: the frequent ones, and those of a few rows."""
    few = sql.SQL(existing_sql.FEW).format(
        column=sql.Identifier(column.name), table=sql.Identifier(relation.schema, relation.name)
    )
    given = {"schema": relation.schema, "table": relation.name, "column": column.name}
    found = {value for (value,) in connection.execute(existing_sql.FREQUENT, given).fetchall()}
    return sorted(found | {value for (value,) in _few(connection, few) if value is not None})


def is_marked(connection: Connection, relation: Relation, flag: Column, time: Column) -> bool:
    """Whether one of a few rows has this flag and not yet this time."""
    marked = sql.SQL(existing_sql.MARKED).format(
        flag=sql.Identifier(flag.name),
        time=sql.Identifier(time.name),
        table=sql.Identifier(relation.schema, relation.name),
    )
    return _few(connection, marked) == [(True,)]


def count(connection: Connection, relation: Relation, condition: str) -> int:
    """Return how many rows match, up to a limit; 0 if that is not cheap to know."""
    query = sql.SQL(existing_sql.COUNT_SOME).format(
        table=sql.Identifier(relation.schema, relation.name), condition=sql.SQL(condition)
    )
    return sum(number for (number,) in _few(connection, query))


def _few(connection: Connection, query: sql.Composed) -> list[tuple[Any, ...]]:
    """Return what a query about a few rows finds; nothing if that is not cheap."""
    try:
        with connection.transaction():
            # A table with many dead rows can take long to find a few that live.
            connection.execute("SET LOCAL statement_timeout = '2s'")
            return connection.execute(query).fetchall()
    except psycopg.errors.QueryCanceled:
        return []
