"""The messages of pgoutput, PostgreSQL's own output plugin: protocol 1, values as text.

Invariants:
- What is not understood is an error, never passed over: a row that is skipped would be lost.
- Values are text, because an event consists of texts: the server makes them as for a query. (Measured: in
  binary the server takes 10 % less, and Python more than that for ids and numbers.)
- A row is cut at the bytes with which a column begins, because that takes a third of the time: PostgreSQL's
  texts contain no NUL, so those bytes are nowhere else. Where the result is not beyond doubt, it is not used.

Source: "Logical Replication Message Formats" in PostgreSQL's manual.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from struct import Struct, error
from typing import Any, Final

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError

BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
INSERT: Final = ord("I")
RELATION: Final = ord("R")
# Origin, type, truncation (of which the publication has none), and messages of other programs.
_IGNORED: Final = frozenset(b"OYTM")

_BEGIN: Final = Struct(">xQQI")
_COMMIT: Final = Struct(">xBQQQ")
# PostgreSQL counts microseconds from the year 2000.
_EPOCH: Final = 946_684_800
_COUNT: Final = Struct(">H")
_LENGTH: Final = Struct(">I")
_TEXT: Final = ord("t")
_NULL: Final = ord("n")
_FIRST: Final = ("id", "seq", "tx", "aggregate_type", "aggregate_id", "event_type", "payload")
_NAMES: Final = ("idempotency_key", "correlation_id", "causation_id", "traceparent", "version")
_WANTED: Final = (*_FIRST, "headers", *_NAMES, "created_at")
_METADATA: Final = tuple(name.replace("_", "-") for name in _NAMES)
_NUMBER: Final = _METADATA[-1]
# What a text of less than 64 KB begins with, before two more bytes of its length.
_SHORT_TEXT: Final = b"t\0\0"
# Below it, no length looks like one.
_MOST_CUT: Final = 0x74_0000
# All columns between the payload and the time are null.
_NO_METADATA: Final = b"nnnnnn" + _SHORT_TEXT
_TIME_AT: Final = len(_NO_METADATA) + 2
_NO_NAMES: Final = (None,) * len(_NAMES)
_new = tuple.__new__


# An inserted row: its event, and the digits of its transaction. A plain tuple is made in half the time.
Row = tuple[Event, bytes]


class Decoder:
    """Decodes rows of the outbox.

    Args:
        with_time: each event's metadata has its time, as `created-at`.
    """

    def __init__(self, *, with_time: bool) -> None:
        self._with_time = with_time
        self._columns: dict[int, list[int]] = {}
        self._usual: set[bytes] = set()
        """Relations that have the columns of the outbox in their order, and no others."""

    def relation(self, message: bytes, *, is_strict: bool = True) -> None:
        """Take over which columns a table has: said before its first row, and after each change.

        Args:
            is_strict: False where the publication has other tables, too.

        Raises:
            SetupError: a column of the outbox is missing.
        """
        relation, names = read_relation(message)
        if missing := [name for name in _WANTED if name not in names]:
            if not is_strict:
                return
            raise SetupError(
                f"the publication leaves out the column {missing[0]} of the outbox: run `outbox cdc setup`"
            )
        self._columns[relation] = [names.index(name) for name in _WANTED]
        self._usual.discard(message[1:5])
        if names == list(_WANTED):
            self._usual.add(message[1:5])

    def knows(self, message: bytes) -> bool:
        """Return whether an inserted row is one of the outbox."""
        return relation_of_row(message) in self._columns

    def row(self, message: bytes, longest: int) -> Row:
        """Return an inserted row; without its content if the message has more than `longest` bytes."""
        # The hot loop: a backlog has 150,000 rows a second.
        if message[1:5] in self._usual and len(message) <= longest and len(message) < _MOST_CUT:
            texts = message.split(_SHORT_TEXT, 7)
            if len(texts) == 8:
                _, event_id, seq, tx, aggregate_type, aggregate_id, event_type, rest = texts
                end = 2 + (rest[0] << 8 | rest[1])
                # If `rest` began with a later column than the payload, fewer than seven would follow.
                if rest.startswith(_NO_METADATA, end):
                    time = rest[end + _TIME_AT :] if self._with_time else None
                    metadata = time and self._metadata(None, _NO_NAMES, time)
                elif tail := _exactly(rest, end, 7):
                    headers, *names, created_at = tail
                    metadata = self._metadata(headers, names, created_at)
                else:
                    return self._any_row(message, longest)
                # The fields of `Event`; joining two tuples would take a tenth of the time.
                event = (
                    int(seq[2:]),
                    event_id[2:].decode(),
                    aggregate_type[2:].decode(),
                    aggregate_id[2:].decode(),
                    event_type[2:].decode(),
                    rest[2:end].decode(),
                    metadata,
                )
                return _new(Event, event), tx[2:]
        return self._any_row(message, longest)

    def _any_row(self, message: bytes, longest: int) -> Row:
        (relation,) = _LENGTH.unpack_from(message, 1)
        (columns,) = _COUNT.unpack_from(message, 6)
        values, _ = _values(message, 8, columns)
        event_id, seq, tx, aggregate_type, aggregate_id, event_type, payload, headers, *names, created_at = (
            values[at] for at in self._columns[relation]
        )
        first = int(seq), event_id.decode(), aggregate_type.decode(), aggregate_id.decode()
        if len(message) > longest:
            event = Event(*first, event_type.decode()[:999], None, None)  # type: ignore[arg-type]
            return event, tx
        metadata = self._metadata(headers, names, created_at)
        return Event(*first, event_type.decode(), payload.decode(), metadata), tx

    def _metadata(
        self, headers: bytes | None, names: Sequence[bytes | None], created_at: bytes
    ) -> str | None:
        """The JSON object that `Event.metadata` has."""
        if not self._with_time and headers is None and not any(names):
            return None
        members = [
            f'"{name}": {text if name == _NUMBER else json.dumps(text, ensure_ascii=False)}'
            for name, text in zip(_METADATA, map(_text, names), strict=True)
            if text is not None
        ]
        if self._with_time:
            members.append(f'"created-at": "{_time(created_at.decode())}"')
        members.append(f'"headers": {"{}" if headers is None else headers.decode()}')
        return "{" + ", ".join(members) + "}"


def read_relation(message: bytes) -> tuple[int, list[str]]:
    """Return the oid of a table and the names of the columns that are published."""
    relation: int = _LENGTH.unpack_from(message, 1)[0]
    rest = message[5:].split(b"\0", 2)[2]
    (columns,) = _COUNT.unpack_from(rest, 1)
    names, at = [], 3
    for _ in range(columns):
        end = rest.index(b"\0", at + 1)
        names.append(rest[at + 1 : end].decode())
        at = end + 9
    return relation, names


def relation_of_row(message: bytes) -> int:
    """Return the oid of the table of an inserted row."""
    relation: int = _LENGTH.unpack_from(message, 1)[0]
    return relation


def read_row(message: bytes) -> list[str | None]:
    """Return the values of an inserted row, in the order of its relation, as PostgreSQL prints them."""
    (columns,) = _COUNT.unpack_from(message, 6)
    values, _ = _values(message, 8, columns)
    return [_text(value) for value in values]


def time_of_begin(message: bytes) -> float:
    """Return when the transaction committed, in seconds since 1970."""
    microseconds: int = _BEGIN.unpack_from(message)[1]
    return microseconds / 1_000_000 + _EPOCH


def end_of_commit(message: bytes) -> int:
    """Return the position in the log behind a transaction."""
    end: int = _COMMIT.unpack_from(message)[2]
    return end


def refuse_unknown(kind: int) -> None:
    """Let messages pass that have nothing to do with the outbox.

    Raises:
        SetupError: the server sends what this version does not know.
    """
    if kind not in _IGNORED:
        raise SetupError(f"PostgreSQL sends a message that is not known here: {chr(kind)!r}")


def _values(message: bytes, at: int, columns: int) -> tuple[list[Any], int]:
    """Return `columns` values of a tuple as bytes, None for NULL, and the position after them."""
    values: list[bytes | None] = []
    length = _LENGTH.unpack_from
    for _ in range(columns):
        kind = message[at]
        if kind == _TEXT:
            end = at + 5 + length(message, at + 1)[0]
            values.append(message[at + 5 : end])
            at = end
        elif kind == _NULL:
            values.append(None)
            at += 1
        else:
            raise SetupError(f"PostgreSQL sends a value of a kind that is not known here: {chr(kind)!r}")
    return values, at


def _exactly(message: bytes, at: int, columns: int) -> list[Any] | None:
    """Return `columns` values; None if the message has fewer, or more."""
    try:
        values, end = _values(message, at, columns)
    except (IndexError, error):
        return None
    return values if end == len(message) else None


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _time(text: str) -> str:
    """A time in UTC, as PostgreSQL prints it in its ISO style, with six digits of the second's fraction."""
    day, _, rest = text.partition(" ")
    time, _, fraction = rest.removesuffix("+00").partition(".")
    return f"{day}T{time}.{fraction:0<6}Z"
