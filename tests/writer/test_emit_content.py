"""The row contains what is passed to `emit`."""

from __future__ import annotations

import enum
import uuid
from typing import Any

import pytest

from outbox_pipelines.writer import NewEvent, emit, emit_many
from tests.schema.events import one
from tests.schema.servers import Connection

COLUMNS = "aggregate_type, aggregate_id, event_type, payload, headers"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
METADATA = "idempotency_key, correlation_id, causation_id, traceparent, version"


class Kind(str, enum.Enum):  # noqa: UP042
    ORDER = "order"
    PLACED = "order.placed"


class Release(int, enum.Enum):
    TWO = 2


class Number(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("key", [None, "k"])
def test_every_argument_has_its_column(connection: Connection, key: str | None) -> None:
    """Guards against two texts that change places, in one of the two statements."""
    emit(
        connection,
        *("type", "id", "event", {"a": [1, None, True, 1.5, "x"]}),
        headers={"tenant": "t", "n": 1},
        idempotency_key=key,
        correlation_id="correlation",
        causation_id="causation",
        traceparent=TRACE,
        version=7,
    )
    assert one(connection, f"SELECT {COLUMNS} FROM outbox") == (
        *("type", "id", "event", {"a": [1, None, True, 1.5, "x"]}),
        {"tenant": "t", "n": 1},
    )
    assert one(connection, f"SELECT {METADATA} FROM outbox") == (key, "correlation", "causation", TRACE, 7)


@pytest.mark.parametrize("key", [None, "k"])
def test_what_is_not_given_is_null(connection: Connection, key: str | None) -> None:
    """Guards against 'None' or 'null' as text, or as JSON, in the columns that were left out."""
    emit(connection, "order", 1, "e", {}, idempotency_key=key)
    assert one(connection, f"SELECT headers, {METADATA} FROM outbox") == (None, key, None, None, None, None)


@pytest.mark.parametrize(
    "payload", [{}, [], [1, 2], "text", 0, 1.5, True, None, {"a": {"b": [{}]}}], ids=repr
)
def test_any_json_is_a_payload(connection: Connection, payload: object) -> None:
    """Guards against a body that is not an object, taken for none."""
    emit(connection, "order", 1, "e", payload)
    assert one(connection, "SELECT payload, payload IS NULL FROM outbox") == (payload, False)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (42, "42"),
        (0, "0"),
        (2**70, str(2**70)),
        (uuid.UUID(int=7), str(uuid.UUID(int=7))),
        ("0042", "0042"),
        (Number.ONE, "1"),
    ],
)
def test_ids_of_any_kind(connection: Connection, given: object, stored: str) -> None:
    """Guards against 0 taken for no id; numbers whose text depends on the driver."""
    emit(connection, "order", given, "e", {})
    assert one(connection, "SELECT aggregate_id FROM outbox") == (stored,)


@pytest.mark.parametrize(
    "text", ["Grüße, 世界 🎈", "%s %(x)s :name $1", "a'b\"c\\d", "\n\t", "{}", "x" * 5000]
)
@pytest.mark.parametrize("key", [True, False])
def test_any_text_anywhere(connection: Connection, text: str, key: bool) -> None:
    """Guards against placeholders found inside values, and letters of another encoding."""
    emit(
        connection,
        *(text, text, text, {text: text}),
        headers={text: text},
        idempotency_key=text if key else None,
        correlation_id=text,
    )
    row: tuple[Any, ...] = one(connection, f"SELECT {COLUMNS}, correlation_id FROM outbox")
    assert row == (text, text, text, {text: text}, {text: text}, text)


@pytest.mark.parametrize("key", [None, Kind.PLACED])
def test_enumerations_of_strings_are_their_values(connection: Connection, key: str | None) -> None:
    """Guards against the *name* of a member, which psycopg writes: topic and event type would be PLACED."""
    emit(connection, Kind.ORDER, Kind.ORDER, Kind.PLACED, {}, idempotency_key=key)
    assert one(
        connection, "SELECT aggregate_type, aggregate_id, event_type, idempotency_key FROM outbox"
    ) == (
        *("order", "order", "order.placed"),
        key and "order.placed",
    )


def test_order_of_calls_is_order_of_seq(connection: Connection) -> None:
    """Guards against events of one transaction that are drawn out of order."""
    seqs = [emit(connection, "order", 1, "e", {}, idempotency_key=k).seq or 0 for k in ("b", None, "a", None)]
    assert seqs == sorted(seqs)
    assert len(set(seqs)) == 4


@pytest.mark.parametrize("version", [Release.TWO, True])
def test_versions_that_are_more_than_numbers(connection: Connection, version: int) -> None:
    """Guards against names of members, or truth values, which drivers send as such."""
    emit(connection, "order", 1, "e", {}, version=version)
    emit_many(connection, [NewEvent("order", 1, "e", {}, version=version)])
    found = one(connection, "SELECT array_agg(version) FROM outbox")
    assert found == ([int(version)] * 2,)


def test_ids_of_requests_may_be_uuids(connection: Connection) -> None:
    """Guards against a UUID that the driver sends as such: no function takes it, the transaction aborts."""
    ids: list[Any] = [uuid.UUID(int=n) for n in range(3)]
    emit(connection, "order", 1, "e", {}, idempotency_key=ids[0], correlation_id=ids[1], causation_id=ids[2])
    found = one(connection, "SELECT idempotency_key, correlation_id, causation_id FROM outbox")
    assert found == tuple(map(str, ids))
