"""`emit_many` beyond what every target has in common: its rows, its statements, its keys."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_pipelines.writer import Emitted, NewEvent, content, emit, emit_many, statements
from outbox_pipelines.writer.context import Surroundings
from tests.schema.events import one
from tests.schema.servers import Connection

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
COLUMNS = (
    "aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key, correlation_id, "
    "causation_id, traceparent, version"
)


def rows(connection: Connection) -> list[tuple[object, ...]]:
    return connection.execute(f"SELECT {COLUMNS} FROM outbox ORDER BY seq".encode()).fetchall()


KEYS = pytest.mark.parametrize(
    "key", [None, "key", "k\x1ey"], ids=["columns", "columns with keys", "JSON array"]
)
"""A list is sent in one of three ways: without keys, with some, and with a text that has a separator."""


@KEYS
def test_every_member_has_its_column(connection: Connection, key: str | None) -> None:
    """Guards against two texts that change places, 'null' in what was left out, and a payload of null taken
    for none."""
    full = NewEvent("type", 7, "event", {"a": [1, None, "x"]}, {"h": 1}, key, "co", "ca", TRACE, 3)
    emit_many(connection, [full, NewEvent("order", 1, "e", None)])
    assert rows(connection) == [
        ("type", "7", *full[2:10]),
        ("order", "1", "e", None, None, None, None, None, None, None),
    ]
    assert one(connection, "SELECT count(*) FROM outbox WHERE payload = 'null'") == (1,)


@pytest.mark.parametrize(
    "text",
    [
        "Grüße, 世界 🎈",
        "%s :name $1",
        "a'b\"c\\d",
        "\n\t\x01\x7f",
        "{}",
        "\\u0000",
        "\x1e",
        "\x1f",
        "a\x1eb\x1fc",
    ],
)
@KEYS
def test_any_text_anywhere(connection: Connection, text: str, key: str | None) -> None:
    """Guards against quotes of two layers, of JSON and of SQL, and texts that look like separators."""
    event = NewEvent(text, text, text, {text: text}, {text: text}, key and text, text, text)
    emit_many(connection, [event, NewEvent("order", 1, "e", text)])
    assert rows(connection) == [(*event[:8], None, None), ("order", "1", "e", text, *[None] * 6)]


@pytest.mark.parametrize("column", ["aggregate_id", "correlation_id", "causation_id"])
@pytest.mark.parametrize("text", ["\x1e", "\x1f", "", "NULL", "null"])
def test_texts_of_one_column(connection: Connection, column: str, text: str) -> None:
    """Guards against text taken for NULL, or NULL for text; two values made of one."""
    event = NewEvent("order", 1, "e", {})
    other: dict[str, Any] = {column: text or ("" if column != "aggregate_id" else "x")}
    odd = event._replace(**other)
    emit_many(connection, [event, odd, event])
    emit_many(connection, [odd])
    found = connection.execute(f"SELECT {column} FROM outbox ORDER BY seq".encode()).fetchall()
    plain = "1" if column == "aggregate_id" else None
    assert found == [(plain,), (getattr(odd, column),), (plain,), (getattr(odd, column),)]


@pytest.mark.parametrize(
    "number", ["12345678901234567890123456789", "0.30000000000000004", "1.1", f"1{'0' * 300}"]
)
@KEYS
def test_numbers_keep_their_digits(connection: Connection, number: str, key: str | None) -> None:
    """Guards against a number that becomes a float where the events are taken apart."""
    value = float(number) if "." in number else int(number)
    event = NewEvent("order", 1, "e", [value])
    emit_many(connection, [event, event._replace(idempotency_key=key)])
    assert one(connection, "SELECT array_agg(payload #>> '{0}') FROM outbox") == ([number] * 2,)


def test_a_generator_of_events(connection: Connection) -> None:
    """Guards against events that are consumed by their check."""
    emitted = emit_many(connection, (NewEvent("order", n, "e", {}) for n in range(3)))
    assert [row[1] for row in rows(connection)] == ["0", "1", "2"]
    assert len(emitted) == 3


def test_a_long_list(connection: Connection) -> None:
    """Guards against order that holds for a few rows only, with or without keys; quadratic time."""
    number = 20_000
    events = [
        NewEvent("order", n, "e", {"n": n}, idempotency_key=f"key {n % 15_000}" if n % 2 else None)
        for n in range(number)
    ]
    emitted = emit_many(connection, events)
    written = connection.execute("SELECT id, seq, aggregate_id::int FROM outbox ORDER BY seq").fetchall()
    expected = [n for n in range(number) if n % 2 == 0 or n < 15_000]
    assert [n for _, _, n in written] == expected
    assert [(emitted[n].id, emitted[n].seq) for n in expected] == [row[:2] for row in written]
    assert [n for n in range(number) if emitted[n].duplicate] == sorted(set(range(number)) - set(expected))
    assert emitted[15_001] == Emitted(emitted[1].id, None, duplicate=True)


def test_a_long_list_without_keys(connection: Connection) -> None:
    """Guards against the same in one INSERT, and against answers that belong to other events."""
    number = 20_000
    events = [NewEvent("order", n, "e", {"n": n}, version=n % 3 or None) for n in range(number)]
    emitted = emit_many(connection, events)
    written = connection.execute("SELECT id, seq, aggregate_id::int FROM outbox ORDER BY seq").fetchall()
    assert [row[2] for row in written] == list(range(number))
    assert len({answer.id for answer in emitted}) == number
    assert [(answer.id, answer.seq, answer.duplicate) for answer in emitted] == [
        (*row[:2], False) for row in written
    ]


def test_a_list_of_several_statements(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an event that is lost or duplicated where one statement ends, and a duplicate across
    that place."""
    monkeypatch.setattr(statements, "_PIECE", 300)
    events = [
        NewEvent("order", n, "e", "x" * (n * 20), idempotency_key="k" if n in (2, 17) else None)
        for n in range(20)
    ]
    assert len(list(statements.many([]))) == 0
    rows_to_send = [content.row(event, Surroundings()) for event in events]
    pieces = list(statements.many(rows_to_send))
    assert [row for piece in pieces for row in piece.rows] == rows_to_send
    assert max(len(str(piece.values)) for piece in pieces if len(piece.rows) > 1) < 500
    emitted = emit_many(connection, events)
    assert [row[1] for row in rows(connection)] == [str(n) for n in range(20) if n != 17]
    assert emitted[17] == Emitted(emitted[2].id, None, duplicate=True)


def test_one_emit_and_a_list_share_keys(connection: Connection) -> None:
    """Guards against two ways to write that do not know of each other's keys."""
    first = emit(connection, "order", 1, "e", {}, idempotency_key="a")
    [again, second] = emit_many(
        connection, [NewEvent("order", 1, "e", {}, idempotency_key=key) for key in ("a", "b")]
    )
    assert again == Emitted(first.id, None, duplicate=True)
    assert emit(connection, "order", 1, "e", {}, idempotency_key="b") == Emitted(
        second.id, None, duplicate=True
    )
