"""A table of processed events that a service has had before this consumer, and keeps.

Invariants:
- A description that cannot be right is rejected before any connection is opened.
- The table is checked once, before the first event: what is missing is one error that says how to correct it.
- A mark is written in the transaction of its handler, after the consumer's own record, or not at all.
- A value that the column would change or refuse is a dead letter, never another event's mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from psycopg import sql

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer.consumer_database import Database
from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event_reading import Event, is_unicode
from outbox_pipelines.errors import SetupError

_VALUES: Final = "id, idempotency_key, header:NAME or payload:NAME"
# Names are written into statements whose parameters begin with % or :.
_REFUSED: Final = frozenset("%:\\\"'\0")
_TEXTS: Final = ("text", "character varying", "character")
_NUMBERS: Final = {"smallint": 15, "integer": 31, "bigint": 63}
_TIMES: Final = ("timestamp with time zone", "timestamp without time zone", "date")
_JSON: Final = ("json", "jsonb", *_TEXTS)
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True)
class DedupeTable:
    """A table in which consumers of your own record processed events; see `Consumer(dedupe_table=…)`.

    Args:
        name: the table, as `processed_events` or `schema.processed_events`, without quotes.
        column: the column that identifies the event; unique alone, or together with `source`.
        value: what is in that column: the event's `id`, its `idempotency_key`, `header:NAME`, or
            `payload:NAME` for a member of the payload. An event without it becomes a dead letter.
        source: the column with the name of the consumer, if there is one.
        source_value: the name that your own consumers write there; by default the `source` of the consumer.
        processed_at: the column that is set to the time; necessary if it has no default.
        received_at: the same, in an inbox.
        payload: the column that is set to the payload, in an inbox.
        is_inbox: a row whose `processed_at` is NULL is received and not processed: its event is handled, and
            `processed_at` is set in the same transaction.
        constants: other columns that need a value, and the text of that value.

    Raises:
        SetupError: a name or a value is invalid.
    """

    name: str
    column: str = "event_id"
    value: str = "id"
    source: str | None = None
    source_value: str | None = None
    processed_at: str | None = None
    received_at: str | None = None
    payload: str | None = None
    is_inbox: bool = False
    constants: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_payload(self) -> bool:
        """Whether a row has something of the payload."""
        return self.payload is not None or self.value.startswith("payload:")

    def __post_init__(self) -> None:
        parts = self.name.split(".")
        if len(parts) > 2 or not all(parts):
            raise SetupError(
                f"dedupe_table has the name {self.name!r}: write a name, or a schema, a dot and a name, "
                "without quotes"
            )
        for name in (*parts, *self.columns):
            if not name or _REFUSED & set(name):
                raise SetupError(
                    f"dedupe_table has the name {name!r}: give a name that is not empty and has no quotes, "
                    "%, : or backslashes"
                )
        if len(set(self.columns)) < len(self.columns):
            twice = next(each for each in self.columns if self.columns.count(each) > 1)
            raise SetupError(f"dedupe_table uses the column {twice} twice: give each column one content")
        kind, colon, rest = self.value.partition(":")
        if (kind, bool(colon), bool(rest)) not in (
            ("id", False, False),
            ("idempotency_key", False, False),
            ("header", True, True),
            ("payload", True, True),
        ):
            raise SetupError(f"dedupe_table has value={self.value!r}: give {_VALUES}")
        if self.source_value is not None and not (self.source and self.source_value):
            raise SetupError(
                "dedupe_table has source_value: name its column too, as source=…, and no empty value"
            )
        if self.is_inbox and self.processed_at is None:
            raise SetupError(
                "dedupe_table has is_inbox=True: name the column that says so, as processed_at=…"
            )

    @property
    def schema(self) -> str | None:
        """The schema, if it is given."""
        return self.name.rpartition(".")[0] or None

    @property
    def table(self) -> str:
        """The name without the schema."""
        return self.name.rpartition(".")[2]

    @property
    def columns(self) -> list[str]:
        """All columns that are written."""
        named = (self.column, self.source, self.processed_at, self.received_at, self.payload)
        return [*(each for each in named if each is not None), *self.constants]

    def value_of(self, event: Event) -> str:
        """Return the text that identifies an event.

        Raises:
            UnreadableError: the event has none.
        """
        kind, _, name = self.value.partition(":")
        if kind == "id":
            return event.id
        found = event.idempotency_key if kind == "idempotency_key" else None
        if kind == "header":
            found = event.headers.get(name)
        if kind == "payload":
            found = _member(event, name)
        if not found:
            what = "idempotency key" if kind == "idempotency_key" else f"{kind} {name!r}"
            raise UnreadableError(f"{event} has no {what}, which dedupe_table {self.name} needs")
        return found


def _member(event: Event, name: str) -> str | None:
    try:
        body = event.payload
    except ValueError:
        return None
    found = body.get(name) if isinstance(body, dict) else None
    return str(found) if isinstance(found, str | int) and not isinstance(found, bool) else None


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    type: str
    length: int | None
    """The most characters, where the type has a limit."""
    is_required: bool
    """NOT NULL, without a default."""
    may_insert: bool
    may_select: bool
    may_update: bool


class Marks:
    """Writes the marks of one consumer; see `load`."""

    def __init__(self, table: DedupeTable, source: str, column: _Column, query: str) -> None:
        self._table = table
        self._column = column
        self._query = query
        self._constants = {f"constant{n}": text for n, text in enumerate(table.constants.values())}
        self._constants["source"] = table.source_value or source

    def mark(self, event: Event) -> tuple[str, str]:
        """Return the value and the payload to be written for an event.

        Raises:
            UnreadableError: the event has no such value, or the table cannot store it.
        """
        value = self._value(event, self._table.value_of(event))
        return value, self._payload(event) if self._table.payload else ""

    async def write(self, database: Database, transaction: Any, marks: Sequence[tuple[str, str]]) -> set[str]:
        """Write marks, and return the values that were new.

        A value that another transaction has written is waited for.
        """
        once = dict(reversed(marks))
        given = {**self._constants, "values": list(once), "payloads": list(once.values())}
        return {str(value) for (value,) in await database.rows(transaction, self._query, given)}

    def _value(self, event: Event, text: str) -> str:
        column = self._column
        try:
            if column.type == "uuid":
                return str(UUID(text))
            if bits := _NUMBERS.get(column.type):
                if not re.fullmatch(r"-?\d{1,19}", text, re.ASCII) or not -(2**bits) <= int(text) < 2**bits:
                    raise ValueError
                return str(int(text))
        except ValueError:
            raise UnreadableError(self._misfit(event, f"is no {column.type}")) from None
        if "\0" in text or not is_unicode(text):
            raise UnreadableError(self._misfit(event, "has characters that PostgreSQL does not store"))
        if column.length is not None and len(text) > column.length:
            raise UnreadableError(self._misfit(event, f"has more than {column.length} characters"))
        # A column of type character(n) does not keep them.
        return text.rstrip(" ") if column.type == "character" else text

    def _misfit(self, event: Event, why: str) -> str:
        table = self._table
        return f"{event}: its {table.value} {why}, and does not fit the column {table.column} of {table.name}"

    def _payload(self, event: Event) -> str:
        try:
            text = json.dumps(event.payload)
        # Bytes are a TypeError.
        except (ValueError, TypeError, RecursionError):
            raise UnreadableError(
                f"{event}: its payload is not JSON, which {self._table.name} needs"
            ) from None
        if _NUL.search(text):
            raise UnreadableError(f"{event}: its payload has \\u0000, which {self._table.name} cannot store")
        return text


async def load(database: Database, table: DedupeTable, source: str) -> Marks:
    """Check the table, and return what writes to it.

    Raises:
        SetupError: the table cannot be used; the message says how to correct that.
    """
    where = {"schema": table.schema, "table": table.table}
    async with database.transaction() as transaction:
        rows = await database.rows(transaction, queries.DEDUPE_TABLE, where)
        if not rows:
            raise SetupError(
                f"dedupe_table {table.name} does not exist, or the role may not use its schema: correct its "
                "name, give it with its schema, or grant USAGE on the schema"
            )
        [(oid, spelled, is_table, is_ours, role)] = rows
        parameters = {"oid": oid}
        columns = await database.rows(transaction, queries.DEDUPE_COLUMNS, parameters)
        uniques = await database.rows(transaction, queries.DEDUPE_UNIQUES, parameters)
    if is_ours:
        raise SetupError(
            f"dedupe_table {table.name} is the consumer's own table {spelled}: give yours with its schema, "
            "such as public.processed_events"
        )
    if not is_table:
        raise SetupError(f"dedupe_table {spelled} is not a table: give the table itself, not a view")
    known = {column.name: column for column in (_Column(*row) for row in columns)}
    _check_columns(table, spelled, known)
    unique = _unique(table, spelled, [json.loads(text) for (text,) in uniques])
    _check_privileges(table, spelled, known, role)
    return Marks(table, source, known[table.column], _query(table, spelled, known, unique))


def _check_columns(table: DedupeTable, spelled: str, known: Mapping[str, _Column]) -> None:
    for name in table.columns:
        if name not in known:
            raise SetupError(
                f"dedupe_table {spelled} has no column {name}: it has {', '.join(known)}; name the right one"
            )
    allowed: list[tuple[str | None, tuple[str, ...]]] = [
        (table.column, (*_TEXTS, "uuid", *_NUMBERS)),
        (table.source, _TEXTS),
        (table.processed_at, _TIMES),
        (table.received_at, _TIMES),
        (table.payload, _JSON),
    ]
    for name_or_none, types in allowed:
        if name_or_none is not None and known[name_or_none].type not in types:
            raise SetupError(
                f"dedupe_table {spelled}: the type of its column {name_or_none} is "
                f"{known[name_or_none].type}; supported there: {', '.join(types)}"
            )
    for column in known.values():
        if column.is_required and column.name not in table.columns:
            raise SetupError(
                f"dedupe_table {spelled}: its column {column.name} is NOT NULL without a default: name it "
                "(source=, processed_at=, received_at=, payload=, constants=), or run ALTER TABLE "
                f"{spelled} ALTER COLUMN {_identifier(column.name)} SET DEFAULT …"
            )


def _unique(table: DedupeTable, spelled: str, uniques: Sequence[Sequence[str]]) -> list[str]:
    """Return the columns of the unique constraint that tells a processed event."""
    wanted = [each for each in (table.column, table.source) if each is not None]
    for names in uniques:
        if table.column in names and set(names) <= set(wanted):
            return list(names)
    columns = ", ".join(map(_identifier, wanted))
    raise SetupError(
        f"dedupe_table {spelled} has no unique constraint on ({columns}): run CREATE UNIQUE INDEX "
        f"CONCURRENTLY ON {spelled} ({columns})"
    )


def _check_privileges(table: DedupeTable, spelled: str, known: Mapping[str, _Column], role: str) -> None:
    used = [known[each] for each in table.columns]
    read = [known[each] for each in (table.column, table.source) if each is not None]
    changed = [known[table.processed_at]] if table.is_inbox and table.processed_at else []
    missing = [
        privilege
        for privilege, is_there in (
            ("SELECT", all(each.may_select for each in (*read, *changed))),
            ("INSERT", all(each.may_insert for each in used)),
            ("UPDATE", all(each.may_update for each in changed)),
        )
        if not is_there
    ]
    if missing:
        raise SetupError(
            f"dedupe_table {spelled}: the role {role} lacks privileges: run GRANT {', '.join(missing)} "
            f"ON {spelled} TO {_identifier(role)}"
        )


def _query(table: DedupeTable, spelled: str, known: Mapping[str, _Column], unique: Sequence[str]) -> str:
    """Return the statement that writes marks; its parameters are those of `Marks.write`."""
    contents: dict[str | None, str] = {
        table.source: "CAST(%(source)s AS text)",
        table.processed_at: "now()",
        table.received_at: "now()",
        table.payload: "CAST(it.payload AS {type})",
        table.column: "CAST(it.value AS {type})",
        **{name: f"CAST(%(constant{n})s AS {{type}})" for n, name in enumerate(table.constants)},
    }
    values = [contents[name].format(type=_cast_type(known[name])) for name in table.columns]
    conflict = "DO NOTHING"
    if table.is_inbox and table.processed_at:
        mark = _identifier(table.processed_at)
        conflict = queries.DEDUPE_INBOX.format(mark=mark)
    return queries.DEDUPE.format(
        table=spelled,
        columns=", ".join(map(_identifier, table.columns)),
        contents=", ".join(values),
        unique=", ".join(map(_identifier, unique)),
        conflict=conflict,
        column=_identifier(table.column),
    )


def _cast_type(column: _Column) -> str:
    # A cast to a type of characters may cut; an assignment of a text that is too long is an error.
    return "text" if column.type in _TEXTS else column.type


def _identifier(name: str) -> str:
    return sql.Identifier(name).as_string()
