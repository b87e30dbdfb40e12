"""What a day's file holds: its columns, by version, and the text of a row that is summed.

Invariants:
- A version never changes once released; a new column makes a new version, and readers give older files NULL
  for it.
- What the row's text covers is every column of the table except `tx`, which means something in one database
  only; columns that users have added are covered too. A row of the table and a row of the file have the same
  text, whoever computes it.
- uuid and jsonb are plain strings: same size, and every reader knows them. So are the columns of users,
  except for integers and booleans: only of these PostgreSQL and DuckDB print every value alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString

import pyarrow as pa

from outbox_pipelines.archive.manifest import Column

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
        # What became of it, as it was when the file was written.
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
"""The table's columns, without those that users have added."""
EVENT_DATE: Final = "event_date"
"""The column of the day, a DATE: it is the directory's name, and in no file."""

# By PostgreSQL's name of the type.
_NATIVE: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
}

BUCKET: Final = 100_000
"""Events a bucket of sums spans, by `seq`."""

# Of free text the length is summed too: without it a separator in a text could move from one to the next.
_FREE: Final[tuple[LiteralString, ...]] = (
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "idempotency_key",
    "correlation_id",
    "causation_id",
    "traceparent",
)
# No separator is in these: JSON's text has it as \u001f.
_OTHERS: Final[tuple[LiteralString, ...]] = ("id", "seq", "payload", "headers", "version")


def added(names_and_types: Iterable[tuple[str, str]]) -> tuple[Column, ...]:
    """The columns that users have added, with their names in the file."""
    # DuckDB takes names that differ in case for the same one.
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
    """Whether the file has a user's column as text."""
    return column.type not in _NATIVE


def schema_with(columns: Sequence[Column]) -> pa.Schema:
    """The schema of a file that has these columns of a user too."""
    extra = [pa.field(column.stored, _NATIVE.get(column.type, pa.string())) for column in columns]
    return pa.schema([*SCHEMA, *extra], metadata=SCHEMA.metadata)


def row_text(microseconds: LiteralString) -> LiteralString:
    """An SQL expression for the text of a row, the same in PostgreSQL and DuckDB.

    In place of `{extra}` come the texts of the columns that users have added: see `EXTRA_TEXT`.

    Args:
        microseconds: what gives `created_at` as µs since 1970, in that engine.
    """
    # What stands before a value tells '' from NULL. chr(31) is ASCII's separator of units.
    texts = [
        *(f"coalesce(length({name}) || '=' || {name}, '')" for name in _FREE),
        *(f"coalesce('=' || {name}::text, '')" for name in _OTHERS),
        f"({microseconds})::text",
    ]
    return f"concat_ws(chr(31), {', '.join(texts)}{{extra}})"


EXTRA_TEXT: Final[LiteralString] = ", coalesce(length({name}::text) || '=' || {name}::text, '')"
"""The same of one column that a user has added: its length too, since it may hold any text."""


def in_duckdb(query: str, columns: Sequence[Column]) -> str:
    """A query for DuckDB with the texts of these columns in place of `{extra}`."""
    return query.replace(
        "{extra}", "".join(EXTRA_TEXT.replace("{name}", quoted(column.stored)) for column in columns)
    )


def quoted(name: str) -> str:
    """A name in DuckDB's SQL."""
    return '"' + name.replace('"', '""') + '"'
