"""The writer's SQL statements, and their values.

Invariants:
- One call is one statement with every driver; a list of more than 64 MB is several.
- Payload and headers are sent as text and parsed by PostgreSQL: numbers keep their digits, and a codec that
  the application has registered for jsonb does not encode them again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from json.encoder import encode_basestring as quoted
from typing import Any, Final, LiteralString, NamedTuple
from uuid import UUID

from outbox_pipelines.writer.content import Row
from outbox_pipelines.writer.errors import OutboxError


class Statement(NamedTuple):
    """One statement, with both styles of placeholders."""

    percent: LiteralString
    numbered: str


class Query(NamedTuple):
    """A statement, its values, and the rows that it writes.

    It returns rows of id, seq, duplicate. Each column costs time, so the last one is absent where no event
    can be a duplicate.
    """

    statement: Statement
    values: tuple[object, ...]
    rows: Sequence[Row]


def _statement(percent: LiteralString) -> Statement:
    numbers = itertools.count(1)
    return Statement(percent, re.sub("%s", lambda _: f"${next(numbers)}", percent))


# The column list allows further columns in the table; the database sets seq and tx. The casts are needed
# because drivers send untyped text, and integers of another width.
_INSERT: Final = _statement("""
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers,
                    correlation_id, causation_id, traceparent, version)
VALUES (%s, %s, %s, %s::text::jsonb, %s::text::jsonb, %s, %s, %s, %s::int)
RETURNING id, seq""")

# Each value costs time, even a NULL, and most events set only these columns.
_INSERT_BARE: Final = _statement("""
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
VALUES (%s, %s, %s, %s::text::jsonb)
RETURNING id, seq""")
_BARE: Final = 4
# What the columns of the table end with; what follows says when the event is due.
_PLAIN: Final = Row._fields.index("deliver_after")
_NOTHING_MORE: Final = (None,) * (len(Row._fields) - _BARE)

# The function claims the key first, so that a duplicate is a result and not an error.
_EMIT: Final = _statement("""
SELECT id, seq, duplicate
FROM outbox_emit(%s, %s, %s, %s::text::jsonb, %s::text::jsonb, %s, %s, %s, %s, %s::int)""")
_EMIT_DELAYED: Final = _statement("""
SELECT id, seq, duplicate
FROM outbox_emit(%s, %s, %s, %s::text::jsonb, %s::text::jsonb, %s, %s, %s, %s, %s::int,
                 outbox_due(%s::text), %s::boolean)""")

# An event that waits has the number that the session drew last.
_WAITING: Final = _statement(
    "SELECT id, NULL::bigint AS seq FROM outbox_delayed WHERE seq = currval('outbox_seq')"
)
CANCEL: Final = _statement("SELECT outbox_cancel(%s::text::uuid)")

# Each column is one text that the server splits: a JSON array took nearly twice as long.
_EMIT_LISTS: Final = _statement("""
SELECT id, seq
FROM outbox_emit_lists(%s::text, %s::text, %s::text, %s::text, %s::text,
                       %s::text, %s::text, %s::text, %s::text)""")
_EMIT_KEYED_LISTS: Final = _statement("""
SELECT id, seq, duplicate
FROM outbox_emit_keyed_lists(%s::text, %s::text, %s::text, %s::text, %s::text,
                             %s::text, %s::text, %s::text, %s::text, %s::text)""")
_BETWEEN: Final = "\x1e"
_NULL: Final = "\x1f"

# The day that `created_at` will have, for the keys of bodies: a transaction that has begun keeps its time.
_DAY: Final = _statement("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD')")
DAY: Final = Query(_DAY, (), ())

# Claims all keys first, in sorted order.
_EMIT_MANY: Final = _statement("SELECT id, seq, duplicate FROM outbox_emit_many(%s::text::jsonb)")

# The limit of a jsonb is 256 MB, and the server has several copies of it in memory.
_PIECE: Final = 64_000_000


def one(row: Row) -> Query:
    """Return the query that writes one event."""
    if row.deliver_after is not None:
        return Query(_EMIT_DELAYED, row, (row,))
    if row.idempotency_key is not None:
        return Query(_EMIT, row[:_PLAIN], (row,))
    if row[_BARE:] == _NOTHING_MORE:
        return Query(_INSERT_BARE, row[:_BARE], (row,))
    return Query(_INSERT, row[:5] + row[6:_PLAIN], (row,))


def waiting(query: Query) -> Query:
    """Return the query for the event whose INSERT had no result."""
    return Query(_WAITING, (), query.rows)


def cancel(id: UUID) -> Query:
    """Return the query that removes a delayed event.

    Raises:
        OutboxError: this is no id.
    """
    try:
        wanted = UUID(str(id))
    except ValueError:
        raise OutboxError(f"cancel was given {id!r}: give the id that emit has returned") from None
    return Query(CANCEL, (str(wanted),), ())


def many(rows: Sequence[Row]) -> Iterator[Query]:
    """Yield the queries that write events in order: one query for up to 64 million characters."""
    if len(rows) == 1:
        yield one(rows[0])
    elif rows:
        columns = _columns(rows)
        texts = columns or [_json_array(rows)]
        if sum(map(len, filter(None, texts))) > _PIECE:
            middle = len(rows) // 2
            yield from many(rows[:middle])
            yield from many(rows[middle:])
        elif columns is None:
            yield Query(_EMIT_MANY, tuple(texts), rows)
        elif columns[_KEY] is None:
            yield Query(_EMIT_LISTS, (*columns[:_KEY], *columns[_KEY + 1 :]), rows)
        else:
            yield Query(_EMIT_KEYED_LISTS, tuple(columns), rows)


def _columns(rows: Sequence[Row]) -> Sequence[str | None] | None:
    """Return a text for each column, None where all are NULL; None if one is delayed or has a separator."""
    texts: list[str | None] = []
    *columns, due, _ = zip(*rows, strict=True)
    if any(due):
        return None
    for column in columns:
        nulls = column.count(None)
        if nulls == len(rows):
            texts.append(None)
            continue
        text = _BETWEEN.join([_NULL if value is None else str(value) for value in column])
        if text.count(_BETWEEN) >= len(rows) or text.count(_NULL) > nulls:
            return None
        texts.append(text)
    return texts


_KEY: Final = Row._fields.index("idempotency_key")


def _json_array(rows: Sequence[Row]) -> str:
    return f"[{','.join(map(_json_object, rows))}]"


def within(query: Query, schema: str) -> Query:
    """Return the query for the outbox of a schema; without, the search_path determines the outbox."""
    return query._replace(statement=_within(query.statement, schema))


@lru_cache(maxsize=1_000)
def _within(statement: Statement, schema: str) -> Statement:
    name = '"' + schema.replace('"', '""') + '".'
    percent = _named(statement.percent, name.replace("%", "%%"))
    return Statement(percent, _named(statement.numbered, name))


def _named(text: str, name: str) -> str:
    literal = name.replace("'", "''")
    return _OUTBOX.sub(lambda found: f"{found[1]}{literal if found[1] else name}{found[2]}", text)


# What stands in the outbox's schema; within a literal of SQL, too.
_OUTBOX: Final = re.compile(r"('?)\b(outbox(?:_\w+)?)\b")


_MEMBERS: Final[list[tuple[str, Callable[[Any], str]]]] = [
    # JSON values and the number are not quoted.
    *(
        (f'"{name}":', str if name in ("payload", "headers", "version") else quoted)
        for name in Row._fields[:-1]
    ),
    ('"later_events_wait":', lambda _: "true"),
]


def _json_object(row: Row) -> str:
    members = [
        name + as_json(value)
        for (name, as_json), value in zip(_MEMBERS, row, strict=True)
        if value is not None
    ]
    return f"{{{','.join(members)}}}"
