"""The manifest of a day's file (rows, digest, sums, source), and the columns of the file by version.

Invariants:
- A file that no manifest names is ignored. The manifest is written last.
- Sums are additive: a bucket's is the sum of its rows' digests, so that two equal errors do not cancel.
- A version of the columns never changes once released; a new column makes a new version, and readers give
  older files NULL for it.
- A row's text covers every column of the table, including those added by users, except `tx`, which is valid
  in one database only. PostgreSQL computes the same text for a row of the table as DuckDB for a row of the
  file.
- uuid and jsonb are stored as strings: same size, and every reader supports them. So are columns added by
  users, except integers and booleans: only for these do PostgreSQL and DuckDB print every value alike.
- Each column has an id in the file, by which readers of Iceberg find it: of a user's column it follows from
  the name in any case and the kind of value, so that all files agree without knowing of each other.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from typing import Final, Literal, LiteralString, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outbox_pipelines.core.text import counted, short
from outbox_pipelines.days.archive.rendering import quoted
from outbox_pipelines.errors import SetupError

VERSION: Final = 1
_TIME: Final = pa.timestamp("us", tz="UTC")
_ID: Final = "PARQUET:field_id"
_COLUMNS: Final = (
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
)
SCHEMA: Final = pa.schema(
    [field.with_metadata({_ID: str(number)}) for number, field in enumerate(_COLUMNS, 1)],
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
EXTRA_TEXT: Final[LiteralString] = ", coalesce(length({name}::text) || '=' || {name}::text, '')"
"""The text of one column added by a user, with its length because it can contain any text."""


class Sum(NamedTuple):
    """The sum of a bucket's rows."""

    rows: int
    total: int
    """Sum of the first 56 bits of each row's sha256."""


class Column(BaseModel):
    """A column that a user has added to the outbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The name in the table."""
    type: str
    """The type in the table, as PostgreSQL prints it."""
    stored: str
    """The name in the file; it differs from `name` if the file already has a column of that name."""


class Source(BaseModel):
    """The outbox that a manifest or an archive comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system_identifier: int
    """The system identifier of the PostgreSQL cluster."""
    database: str
    schema_: str = Field(alias="schema")

    def __str__(self) -> str:
        return f"schema {self.schema_} of database {self.database} (system {self.system_identifier})"


class Change(BaseModel):
    """A change of a day after it was archived."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: datetime
    by: str
    """The role in the database, and on whose behalf it acted."""
    reason: str
    kind: Literal["redacted", "expired"]
    names: tuple[str, ...]
    """Paths of redacted values, or aggregate types of which events have expired."""
    events: int
    """Number of events changed or removed."""
    rows_before: int
    rows_after: int
    sha256: str
    """The checksum of the file that was replaced."""
    manifest_sha256: str
    """The digest of the manifest that was replaced."""

    def __str__(self) -> str:
        what = "redacted in" if self.kind == "redacted" else "expired, removed"
        names, events = short(", ".join(self.names)), counted(self.events, "event")
        return f"{names} {what} {events} on {self.at:%Y-%m-%d} by {self.by}: {short(self.reason)}"


class Manifest(BaseModel):
    """The manifest of one day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    day: date
    file: str
    """The name of the file, without its directory."""
    size: int
    """The size of the file in bytes."""
    sha256: str
    """The checksum of the file."""
    rows: int
    first_seq: int | None
    last_seq: int | None
    first_created_at: datetime | None
    last_created_at: datetime | None
    first_id: str | None
    """The lowest id of version 7; such ids contain the time when they were generated."""
    last_id: str | None
    """The highest id of version 7."""
    statuses: dict[str, int]
    """Number of rows by status."""
    buckets: dict[int, Sum]
    """Sums by `seq` // 100,000."""
    schema_version: int
    columns: tuple[Column, ...] = ()
    """Columns added by users, in the order of the table; the sums include them."""
    tool: str
    source: Source
    written_at: datetime
    changes: tuple[Change, ...] = ()
    """What has been changed since the day was archived, in order."""

    def to_bytes(self) -> bytes:
        """Return the stored form."""
        return self.model_dump_json(indent=1, by_alias=True).encode() + b"\n"


def read_manifest(stored: bytes, day: date) -> Manifest:
    """Return the manifest of this day from its stored form.

    Raises:
        SetupError: it is not a manifest, or it is one of another day.
    """
    remedy = f"if its rows still exist, rewrite it with `outbox archive day {day} --again`"
    try:
        manifest = Manifest.model_validate_json(stored)
    except ValidationError as error:
        problem = error.errors()[0]
        what = ": ".join((*map(str, problem["loc"]), problem["msg"]))
        raise SetupError(f"the manifest of {day} cannot be read: {what}; {remedy}") from None
    if manifest.day != day:
        raise SetupError(
            f"the manifest of {day} is the one of {manifest.day}: it is in the wrong location; {remedy}"
        )
    return manifest


def digest(stored: bytes) -> str:
    """Return the digest of a manifest, as the database records it."""
    return hashlib.sha256(stored).hexdigest()


def is_recorded(stored: bytes, recorded: str) -> bool:
    """Return whether a manifest is what the database has recorded: one digest, or two during a change."""
    return digest(stored) in recorded.split()


def now() -> datetime:
    """Return the current time in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


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
    return pa.schema([*SCHEMA, *map(_field, columns)], metadata=SCHEMA.metadata)


def _field(column: Column) -> pa.Field:
    type = _NATIVE.get(column.type, pa.string())
    # Integers of all sizes are one column, which Iceberg widens.
    kind = "integer" if pa.types.is_integer(type) else str(type)
    number = 1000 + zlib.crc32(f"{kind} {column.stored.casefold()}".encode()) % 1_000_000_000
    return pa.field(column.stored, type, metadata={_ID: str(number)})


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


def in_duckdb(query: str, columns: Sequence[Column]) -> str:
    """Return a query for DuckDB in which `{extra}` is replaced by the texts of these columns."""
    return query.replace(
        "{extra}", "".join(EXTRA_TEXT.replace("{name}", quoted(column.stored)) for column in columns)
    )
