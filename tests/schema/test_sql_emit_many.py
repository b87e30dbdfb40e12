"""`outbox_emit_many`: many events in one call, for every language."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from tests.schema.events import insert, one, purge_after_claims
from tests.schema.servers import Connection, Database

CALL = "SELECT id, seq, duplicate FROM outbox_emit_many(%s::jsonb)"


def event(number: object = 1, **members: object) -> dict[str, object]:
    return {"aggregate_type": "order", "aggregate_id": number, "event_type": "e", "payload": {}} | members


def emit_many(connection: Connection, *events: dict[str, object]) -> list[tuple[Any, ...]]:
    return connection.execute(CALL, [json.dumps(events)]).fetchall()


def written(connection: Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT id, seq, aggregate_id FROM outbox ORDER BY seq").fetchall()


def test_it_returns_what_it_wrote(connection: Connection) -> None:
    """Guards against an answer that belongs to another row, or a member that ends up in another column."""
    [answer] = connection.execute(
        "SELECT * FROM outbox_emit_many($$[{"
        '"aggregate_type": "order", "aggregate_id": "42", "event_type": "order.placed", '
        '"payload": {"total": 5}, "headers": {"h": "1"}, '
        '"idempotency_key": "key", "correlation_id": "correlation", '
        '"causation_id": "causation", "traceparent": "trace", "version": 3}]$$)'
    )
    assert one(
        connection,
        "SELECT id, seq, false, aggregate_type, aggregate_id, event_type, payload, headers, idempotency_key, "
        "correlation_id, causation_id, traceparent, version FROM outbox",
    ) == (
        *answer,
        *("order", "42", "order.placed", {"total": 5}, {"h": "1"}),
        *("key", "correlation", "causation", "trace", 3),
    )


def test_members_that_are_null_or_missing(connection: Connection) -> None:
    """Guards against a serializer that writes null for what is not there, and against null as a payload,
    which is one."""
    optional = ["headers", "idempotency_key", "correlation_id", "causation_id", "traceparent", "version"]
    emit_many(connection, event(**dict.fromkeys(optional)), event(payload=None))
    assert one(
        connection,
        f"SELECT count(*), count(*) FILTER (WHERE payload = 'null') FROM outbox "
        f"WHERE num_nonnulls({', '.join(optional)}) = 0",
    ) == (2, 1)


def test_the_order_of_the_array_is_that_of_seq(connection: Connection) -> None:
    """Guards against events sorted by their keys, or by a hash: consumers would see an unintended order."""
    events = [event(n, idempotency_key=f"key {n % 40}" if n % 3 else None) for n in range(100)]
    answers = emit_many(connection, *events)
    assert len(answers) == 100
    fresh = [n for n in range(100) if n % 3 == 0 or not any(n % 40 == m % 40 and m % 3 for m in range(n))]
    assert [row[2] for row in written(connection)] == [str(n) for n in fresh]
    assert [answers[n][:2] for n in fresh] == [row[:2] for row in written(connection)]


def test_known_keys_insert_nothing(connection: Connection) -> None:
    """Guards against a retried request that publishes its events twice, or leaves out those without a key."""
    plain = insert(connection, idempotency_key="a")
    [first] = emit_many(connection, event(idempotency_key="b"))
    answers = emit_many(
        connection, *(event(idempotency_key=key) for key in ("a", "c", None, "b", "c", None, "c"))
    )
    assert [answer[2] for answer in answers] == [True, False, False, True, True, False, True]
    ids = {key: answers[n][0] for n, key in enumerate("ac-b")}
    assert (ids["a"], ids["b"]) == (plain.id, first[0])
    assert [answers[n][:2] for n in (4, 6)] == [(ids["c"], None)] * 2
    assert len({answer[0] for answer in answers}) == 5
    assert one(connection, "SELECT count(*) FROM outbox") == (5,)


def test_a_key_that_is_purged_concurrently_is_free(connection: Connection) -> None:
    """Guards against a duplicate of an event without an id, or a loop without an end."""
    insert(connection, idempotency_key="k")
    purge_after_claims(connection)
    [other, answer] = emit_many(connection, event(idempotency_key="other"), event(idempotency_key="k"))
    assert [answer[2], other[2]] == [False, False]
    assert written(connection)[1:] == [(*other[:2], "1"), (*answer[:2], "1")]


@pytest.mark.parametrize("call", ["emit_many", "emit", "insert"])
def test_keys_are_found_by_their_index(database: Database, call: str) -> None:
    """Guards against a plan made when there were no keys: its session would read all of them at every
    call."""
    with database.connect() as connection:
        # What autovacuum leaves of a table whose keys were purged: for so few rows a scan costs least.
        connection.execute("VACUUM (ANALYZE) outbox_keys")
        with connection.transaction():
            for n in range(10):
                if call == "emit_many":
                    emit_many(connection, *(event(idempotency_key=f"{n} {m % 5}") for m in range(10)))
                elif call == "emit":
                    for _ in range(2):
                        connection.execute(
                            "SELECT outbox_emit('order', '1', 'e', '{}', idempotency_key => %s::text)", [n]
                        )
                else:
                    insert(connection, idempotency_key=str(n))
            scans = (
                "SELECT seq_scan, idx_scan > 0 FROM pg_stat_xact_user_tables WHERE relname = 'outbox_keys'"
            )
            assert one(connection, scans) == (0, True)


def test_nothing_is_an_answer(connection: Connection) -> None:
    """Guards against an error, or a row of NULLs, for an empty array."""
    assert emit_many(connection) == []


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([event() | {"idempotencykey": "k"}], "members of an event that are not known.*idempotencykey"),
        ({"aggregate_type": "order"}, "cannot extract elements from an object"),
        ([1], "cannot delete from scalar"),
        (
            [{"aggregate_type": "order", "aggregate_id": "1", "event_type": "e"}],
            "null value in column .payload",
        ),
        ([event(aggregate_type="")], "aggregate_type is empty"),
        ([event(idempotency_key="")], "idempotency_key is empty"),
        ([event(headers=[])], "headers of e are not an object"),
        ([event(version="x")], "invalid input syntax for type integer"),
    ],
    ids=[
        "unknown member",
        "no array",
        "no object",
        "no payload",
        "empty name",
        "empty key",
        "headers",
        "version",
    ],
)
def test_what_is_no_event(connection: Connection, events: object, error: str) -> None:
    """Guards against a misspelled key that is ignored: every retry would be written again."""
    with pytest.raises(psycopg.Error, match=error), connection.transaction():
        connection.execute(CALL, [json.dumps(events)])
    assert one(connection, "SELECT count(*) FROM outbox_keys") == (0,)
