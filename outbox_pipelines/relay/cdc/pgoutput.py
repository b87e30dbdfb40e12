"""The messages of pgoutput, PostgreSQL's own output plugin: protocol 1, values as text.

Invariants:
- What is not understood is an error, never passed over: a row that is skipped would be lost.
- Values are text, because an event consists of texts: the server makes them as for a query. (Measured: in
  binary the server takes 10 % less, and Python more than that for ids and numbers.)

Source: "Logical Replication Message Formats" in PostgreSQL's manual.
"""

from __future__ import annotations

import json
from struct import Struct
from typing import Any, Final, NamedTuple

from outbox_pipelines.errors import SetupError
from outbox_pipelines.event import Event

BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
INSERT: Final = ord("I")
RELATION: Final = ord("R")
# Origin, type, truncation (of which the publication has none), and messages of other programs.
_IGNORED: Final = frozenset(b"OYTM")

_COMMIT: Final = Struct(">xBQQQ")
_COUNT: Final = Struct(">H")
_LENGTH: Final = Struct(">I")
_TEXT: Final = ord("t")
_NULL: Final = ord("n")
_FIRST: Final = ("seq", "id", "aggregate_type", "aggregate_id", "event_type", "payload", "tx", "created_at")
_NAMES: Final = ("idempotency_key", "correlation_id", "causation_id", "traceparent", "version")
_METADATA: Final = tuple(name.replace("_", "-") for name in _NAMES)
_NUMBER: Final = _METADATA[-1]


class Row(NamedTuple):
    """An inserted row."""

    event: Event
    tx: int
    """Its transaction."""


class Decoder:
    """Decodes rows of the outbox.

    Args:
        with_time: each event's metadata has its time, as `created-at`.
    """

    def __init__(self, *, with_time: bool) -> None:
        self._with_time = with_time
        self._columns: dict[int, list[int]] = {}

    def relation(self, message: bytes, *, is_strict: bool = True) -> None:
        """Take over which columns a table has: said before its first row, and after each change.

        Args:
            is_strict: False where the publication has other tables, too.

        Raises:
            SetupError: a column of the outbox is missing.
        """
        relation = _LENGTH.unpack_from(message, 1)[0]
        rest = message[5:].split(b"\0", 2)[2]
        (columns,) = _COUNT.unpack_from(rest, 1)
        names, at = [], 3
        for _ in range(columns):
            end = rest.index(b"\0", at + 1)
            names.append(rest[at + 1 : end].decode())
            at = end + 9
        wanted = (*_FIRST, "headers", *_NAMES)
        if missing := [name for name in wanted if name not in names]:
            if not is_strict:
                return
            raise SetupError(
                f"the publication leaves out the column {missing[0]} of the outbox: run `outbox cdc setup`"
            )
        self._columns[relation] = [names.index(name) for name in wanted]

    def knows(self, message: bytes) -> bool:
        """Return whether an inserted row is one of the outbox."""
        return _LENGTH.unpack_from(message, 1)[0] in self._columns

    def row(self, message: bytes, longest: int) -> Row:
        """Return an inserted row; without its content if the message has more than `longest` bytes."""
        (relation,) = _LENGTH.unpack_from(message, 1)
        values = _values(message, 6)
        seq, event_id, aggregate_type, aggregate_id, event_type, payload, tx, created_at, headers, *more = (
            values[at] for at in self._columns[relation]
        )
        names = int(seq), event_id.decode(), aggregate_type.decode(), aggregate_id.decode()
        if len(message) > longest:
            event = Event(*names, event_type.decode()[:999], None, None)  # type: ignore[arg-type]
            return Row(event, int(tx))
        metadata = None
        if self._with_time or headers is not None or any(value is not None for value in more):
            metadata = _metadata(headers, more, created_at if self._with_time else None)
        return Row(Event(*names, event_type.decode(), payload.decode(), metadata), int(tx))


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


def _values(message: bytes, at: int) -> list[Any]:
    """The columns of a tuple, as bytes; None for NULL."""
    (columns,) = _COUNT.unpack_from(message, at)
    at += 2
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
    return values


def _metadata(headers: bytes | None, more: list[bytes | None], created_at: bytes | None) -> str:
    """The JSON object that `Event.metadata` has."""
    members = [
        f'"{name}": {value.decode() if name == _NUMBER else json.dumps(value.decode(), ensure_ascii=False)}'
        for name, value in zip(_METADATA, more, strict=True)
        if value is not None
    ]
    if created_at is not None:
        members.append(f'"created-at": "{_time(created_at.decode())}"')
    members.append(f'"headers": {"{}" if headers is None else headers.decode()}')
    return "{" + ", ".join(members) + "}"


def _time(text: str) -> str:
    """A time in UTC, as PostgreSQL prints it in its ISO style, with six digits of the second's fraction."""
    day, _, rest = text.partition(" ")
    time, _, fraction = rest.removesuffix("+00").partition(".")
    return f"{day}T{time}.{fraction:0<6}Z"
