"""The columns of a day's file, by version, and the text of a row that is summed.

Invariants:
- A version never changes once released; a new column makes a new version, and readers give older files NULL
  for it.
- A row's text covers every column of the table, including those added by users, except `tx`, which is valid
  in one database only. PostgreSQL computes the same text for a row of the table as DuckDB for a row of the
  file.
- uuid and jsonb are stored as strings: same size, and every reader supports them. So are columns added by
  users, except integers and booleans: only for these do PostgreSQL and DuckDB print every value alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString

import pyarrow as pa

from outbox_pipelines.days.archive.manifest import Column
from outbox_pipelines.days.archive.rendering import quoted

VERSION: Final = 1

_TIME: Final = pa.timestamp("us", tz="UTC")

SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("aggregate_type", pa.string(), nullable=False),
        pa.field("aggregate_id", pa.string(), nullable=False),
        pa.field("event_type", pa.string(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),
        pa.field("headers", pa.string()),
        pa.field("idempotency_key", pa.string()),
        pa.field("correlation_id", pa.string()),
        pa.field("causation_id", pa.string()),
        pa.field("traceparent", pa.string()),
        pa.field("version", pa.int32()),
        pa.field("created_at", _TIME, nullable=False),
        # The event's outcome, at the time when the file was written.
        pa.field("status", pa.string(), nullable=False),
        pa.field("published_at", _TIME),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("last_error", pa.string()),
    ],
    metadata={"outbox_schema_version": str(VERSION)},
)

OWN: Final = (
    *("id", "seq", "tx", "aggregate_type", "aggregate_id", "event_type", "payload", "headers"),
    *("idempotency_key", "correlation_id", "causation_id", "traceparent", "version", "created_at"),
)
"""The table's columns, without those added by users."""
EVENT_DATE: Final = "event_date"
"""The column of the day, a DATE: it comes from the directory's name and is not in the files."""

# The file's type by PostgreSQL's name of the type.
_NATIVE: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
}

BUCKET: Final = 100_000
"""The range of `seq` that one bucket of sums spans."""

# The sums include the length of free text: otherwise a separator in one text could shift into the next.
_FREE: Final[tuple[LiteralString, ...]] = (
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "idempotency_key",
    "correlation_id",
    "causation_id",
    "traceparent",
)
# These contain no separator: JSON escapes it as \u001f.
_OTHERS: Final[tuple[LiteralString, ...]] = ("id", "seq", "payload", "headers", "version")


def added(names_and_types: Iterable[tuple[str, str]]) -> tuple[Column, ...]:
    """Return the columns added by users, with their names in the file."""
    # DuckDB's names are case-insensitive.
    taken = {name.casefold() for name in (*SCHEMA.names, EVENT_DATE)}
    columns = []
    for name, type in names_and_types:
        stored = name
        while stored.casefold() in taken:
            stored += "_"
        taken.add(stored.casefold())
        columns.append(Column(name=name, type=type, stored=stored))
    return tuple(columns)


def is_text(column: Column) -> bool:
    """Return whether the file stores a user's column as text."""
    return column.type not in _NATIVE


def schema_with(columns: Sequence[Column]) -> pa.Schema:
    """Return the schema of a file that also has these columns added by users."""
    extra = [pa.field(column.stored, _NATIVE.get(column.type, pa.string())) for column in columns]
    return pa.schema([*SCHEMA, *extra], metadata=SCHEMA.metadata)


def row_text(microseconds: LiteralString) -> LiteralString:
    """Return an SQL expression for the text of a row, the same in PostgreSQL and DuckDB.

    `{extra}` is replaced by the texts of the columns added by users: see `EXTRA_TEXT`.

    Args:
        microseconds: an expression for `created_at` in µs since 1970, in that engine's SQL.
    """
    # The prefix of a value distinguishes '' from NULL. chr(31) is ASCII's unit separator.
    texts = [
        *(f"coalesce(length({name}) || '=' || {name}, '')" for name in _FREE),
        *(f"coalesce('=' || {name}::text, '')" for name in _OTHERS),
        f"({microseconds})::text",
    ]
    return f"concat_ws(chr(31), {', '.join(texts)}{{extra}})"


EXTRA_TEXT: Final[LiteralString] = ", coalesce(length({name}::text) || '=' || {name}::text, '')"
"""The text of one column added by a user, with its length because it can contain any text."""


def in_duckdb(query: str, columns: Sequence[Column]) -> str:
    """Return a query for DuckDB in which `{extra}` is replaced by the texts of these columns."""
    return query.replace(
        "{extra}", "".join(EXTRA_TEXT.replace("{name}", quoted(column.stored)) for column in columns)
    )
