"""Rows as pgoutput sends them: cut quickly, the same as column by column."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Sequence

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.read.slot.pgoutput import Decoder

_COLUMNS = (
    *("id", "seq", "tx", "aggregate_type", "aggregate_id", "event_type", "payload", "headers"),
    *("idempotency_key", "correlation_id", "causation_id", "traceparent", "version", "created_at"),
)
_ID = "01a20db5-9dd4-7c49-86de-4fe5c1a6b02f"
_TIME = "2026-11-24 13:18:55.9+00"
# Lengths with bytes that begin a column, and around the one at which more than two bytes are needed.
_SIZES = (0, 1, 115, 116, 117, 0x7400, 0x7474, 65_535, 65_536, 65_537, 0x74_0000)


def _relation(number: int, columns: Sequence[str]) -> bytes:
    described = b"".join(b"\0" + name.encode() + b"\0" + struct.pack(">Ii", 25, -1) for name in columns)
    return (
        b"R" + struct.pack(">I", number) + b"public\0outbox\0d" + struct.pack(">H", len(columns)) + described
    )


def _insert(number: int, values: Sequence[str | None]) -> bytes:
    row = b""
    for value in values:
        text = None if value is None else value.encode()
        row += b"n" if text is None else b"t" + struct.pack(">I", len(text)) + text
    return b"I" + struct.pack(">I", number) + b"N" + struct.pack(">H", len(values)) + row


def _decode(
    number: int, columns: Sequence[str], values: Sequence[str | None], *, with_time: bool
) -> tuple[Event, int]:
    decoder = Decoder(with_time=with_time)
    decoder.relation(_relation(number, columns))
    event, tx = decoder.row(_insert(number, values), 1 << 30)
    return event, int(tx)


def _expected(row: dict[str, str | None], *, with_time: bool) -> tuple[object, ...]:
    metadata = {
        name.replace("_", "-"): int(row[name] or 0) if name == "version" else row[name]
        for name in _COLUMNS[8:13]
        if row[name] is not None
    }
    has_metadata = bool(metadata) or row["headers"] is not None or with_time
    if has_metadata:
        metadata["headers"] = json.loads(row["headers"] or "{}")
    if with_time:
        metadata["created-at"] = "2026-11-24T13:18:55.900000Z"
    return (
        *(int(row["seq"] or 0), row["id"], row["aggregate_type"], row["aggregate_id"], row["event_type"]),
        *(row["payload"], metadata if has_metadata else None),
    )


def _row(payload: str, optional: Sequence[str | None], *, name: str = "order") -> dict[str, str | None]:
    values = (_ID, "7", "770", name, "t", "nnnnnn", payload, *optional, _TIME)
    return dict(zip(_COLUMNS, values, strict=True))


@pytest.mark.parametrize("with_time", [False, True])
@pytest.mark.parametrize("order", ["usual", "other", "more"])
@pytest.mark.parametrize("number", [16_400, 0x74_0000_74])
def test_a_row_is_the_same_however_it_is_cut(number: int, order: str, with_time: bool) -> None:
    """Guards against a quick way that takes one column for a part of another."""
    some = ('{"a": "t"}', "t", "tnnnnnn", "nnnnnnt", "ü\n", "-1")
    seen = set()
    for which in itertools.product((False, True), repeat=6):
        optional = [value if is_there else None for value, is_there in zip(some, which, strict=True)]
        for size in random.Random(sum(which)).sample(_SIZES, 4) if any(which) else _SIZES:
            row = _row("t" * size, optional, name="größe" if size % 2 else "nnnnnnt")
            columns = list(_COLUMNS)
            if order == "other":
                columns = [*columns[1:], columns[0]]
            values = [row[column] for column in columns]
            if order == "more":
                columns += [f"more_{n}" for n in range(7)]
                values += [*[None] * 6, "t"]
            event, tx = _decode(number, columns, values, with_time=with_time)
            found = (*event[:6], None if event.metadata is None else json.loads(event.metadata))
            assert found == _expected(row, with_time=with_time), (which, size)
            assert tx == 770
            seen.add(size)
    assert seen == set(_SIZES)


def test_a_changed_table_is_cut_as_it_is_now() -> None:
    """Guards against the order of columns that a relation had before."""
    decoder = Decoder(with_time=False)
    row = _row("{}", [None] * 6)
    swapped = ("id", "tx", "seq", *_COLUMNS[3:])
    for described in (_COLUMNS, swapped, _COLUMNS):
        decoder.relation(_relation(1, described))
        event, _ = decoder.row(_insert(1, [row[column] for column in described]), 1 << 30)
        assert (event.id, event.seq, event.payload) == (_ID, 7, "{}")


def test_a_long_row_has_no_content() -> None:
    """Guards against a row in memory that should be read alone."""
    decoder = Decoder(with_time=False)
    decoder.relation(_relation(1, _COLUMNS))
    message = _insert(1, list(_row("t" * 1000, [None] * 6).values()))
    assert decoder.row(message, len(message))[0].payload == "t" * 1000
    payload: str | None = decoder.row(message, len(message) - 1)[0].payload
    assert payload is None
