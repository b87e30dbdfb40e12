"""What is sent: every statement of the writer, and its values.

Invariants:
- One call is one statement, whatever the driver; a list of more than 64 MB is several.
- Payload and headers go as text and are parsed by PostgreSQL: numbers keep their digits, and a codec that the
  application has registered for jsonb encodes nothing twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from json.encoder import encode_basestring as quoted
from typing import Any, Final, LiteralString, NamedTuple

from outbox_pipelines.writer.content import Row


class Statement(NamedTuple):
    """One statement, in both ways that drivers write placeholders."""

    percent: LiteralString
    numbered: str


class Query(NamedTuple):
    """A statement and its values. It answers rows of id, seq, duplicate."""

    statement: Statement
    values: tuple[object, ...]


def _statement(percent: LiteralString) -> Statement:
    numbers = itertools.count(1)
    return Statement(percent, re.sub("%s", lambda _: f"${next(numbers)}", percent))


# A column list, so that the table may grow; seq and tx are drawn by the database. Casts, because drivers send
# text of no type, and an int of another width.
_INSERT: Final = _statement("""
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers,
                    correlation_id, causation_id, traceparent, version)
VALUES (%s, %s, %s, %s::text::jsonb, %s::text::jsonb, %s, %s, %s, %s::int)
RETURNING id, seq, false""")

# The function claims the key first, so that a duplicate is an answer and not an error.
_EMIT: Final = _statement("""
SELECT id, seq, duplicate
FROM outbox_emit(%s, %s, %s, %s::text::jsonb, %s::text::jsonb, %s, %s, %s, %s, %s::int)""")

# One JSON array, not an array for each column: measured a third faster, and the same from every language.
_EMIT_MANY: Final = _statement("SELECT id, seq, duplicate FROM outbox_emit_many(%s::text::jsonb)")

# A jsonb holds 256 MB; the server has a few copies of it in memory.
_PIECE: Final = 64_000_000


def one(row: Row) -> Query:
    """Writes one event."""
    if row.idempotency_key is None:
        return Query(_INSERT, row[:5] + row[6:])
    return Query(_EMIT, row)


def many(rows: Iterable[Row], schema: str | None = None) -> Iterator[Query]:
    """Write events in order: one query for up to 64 million characters of JSON.

    Without a schema the search_path leads to the outbox.
    """
    statement = _EMIT_MANY if schema is None else _in_schema(_EMIT_MANY, schema)
    piece: list[str] = []
    size = 0
    for row in rows:
        text = _json_object(row)
        if piece and size + len(text) > _PIECE:
            yield Query(statement, (f"[{','.join(piece)}]",))
            piece, size = [], 0
        piece.append(text)
        size += len(text)
    if piece:
        yield Query(statement, (f"[{','.join(piece)}]",))


def _in_schema(statement: Statement, schema: str) -> Statement:
    name = '"' + schema.replace('"', '""') + '".outbox_emit_many'
    return Statement(
        statement.percent.replace("outbox_emit_many", name.replace("%", "%%")),
        statement.numbered.replace("outbox_emit_many", name),
    )


_MEMBERS: Final[list[tuple[str, Callable[[Any], str]]]] = [
    # What is JSON already, and the number, is not quoted.
    (f'"{name}":', str if name in ("payload", "headers", "version") else quoted)
    for name in Row._fields
]


def _json_object(row: Row) -> str:
    members = [
        name + as_json(value)
        for (name, as_json), value in zip(_MEMBERS, row, strict=True)
        if value is not None
    ]
    return f"{{{','.join(members)}}}"
