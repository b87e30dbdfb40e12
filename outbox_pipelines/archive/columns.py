"""What a day's file holds: its columns, by version, and the text of a row that is summed.

Invariants:
- A version never changes once released; a new column makes a new version, and readers give older files NULL
  for it.
- What the row's text covers is the outbox's own columns, but for `tx`, which means something in one database
  only. A row of the table and a row of the file have the same text, whoever computes it.
- uuid and jsonb are plain strings: same size, and every reader knows them.
"""

from __future__ import annotations

from typing import Final, LiteralString

import pyarrow as pa

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


def row_text(microseconds: LiteralString) -> LiteralString:
    """An SQL expression for the text of a row, the same in PostgreSQL and DuckDB.

    Args:
        microseconds: what gives `created_at` as µs since 1970, in that engine.
    """
    # What stands before a value tells '' from NULL. chr(31) is ASCII's separator of units.
    texts = [
        *(f"coalesce(length({name}) || '=' || {name}, '')" for name in _FREE),
        *(f"coalesce('=' || {name}::text, '')" for name in _OTHERS),
        f"({microseconds})::text",
    ]
    return f"concat_ws(chr(31), {', '.join(texts)})"
