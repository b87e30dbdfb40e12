"""Ids: UUIDs of version 7, drawn by the server, in the order of time."""

from __future__ import annotations

import itertools
from uuid import RFC_4122, UUID

import pytest

from tests.schema.events import insert, one
from tests.schema.servers import Connection


def milliseconds(drawn: UUID) -> int:
    return drawn.int >> 80


def test_default_is_version_7_and_carries_the_time(connection: Connection) -> None:
    """Guards against random ids, which scatter over the index; or bits in the wrong place."""
    clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    [before] = one(connection, clock)
    drawn = [insert(connection).id for _ in range(50)]
    drawn += [insert(connection, idempotency_key=f"k{n}").id for n in range(50)]
    drawn += [
        one(connection, "SELECT id FROM outbox_emit('o', '1', 'e', '{}', NULL, %s)", key)[0]
        for key in [None, "a", "b"]
    ]
    [after] = one(connection, clock)
    assert {(each.version, each.variant) for each in drawn} == {(7, RFC_4122)}
    times = [milliseconds(each) for each in drawn]
    # Rounded up or cut off: a millisecond either way.
    assert before - 1 <= times[0] <= times[-1] <= after + 1
    assert all(earlier <= later + 1 for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("function", ["outbox_uuidv7()", "id"])
def test_ids_differ(connection: Connection, function: str) -> None:
    """Guards against too few random bits: events of one millisecond that share an id."""
    connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'order', i::text, 'e', '{}' FROM generate_series(1, 2000) i"
    )
    rows = connection.execute(f"SELECT {function} FROM outbox".encode()).fetchall()
    drawn = {row[0] for row in rows}
    assert len(drawn) == 2000
    assert {(each.version, each.variant) for each in drawn} == {(7, RFC_4122)}
    # The last 62 bits are random: each of them is set in about half of the ids.
    for bit in range(62):
        assert 700 < sum(each.int >> bit & 1 for each in drawn) < 1300, bit


def test_ids_of_a_list_follow_the_first(connection: Connection) -> None:
    """Guards against a list that leaves version 7 or wraps into another list's ids; one id for two events."""
    first = UUID("0190a5d4-7c2b-7abc-8def-0123fffffffe")
    ids = connection.execute(
        "SELECT outbox_nth_id(left(%s::text, -8), outbox_counter(%s) + n) FROM generate_series(1, 4) n",
        [first, first],
    ).fetchall()
    assert [str(each) for (each,) in ids] == [
        "0190a5d4-7c2b-7abc-8def-0123ffffffff",
        "0190a5d4-7c2b-7abc-8def-012300000000",
        "0190a5d4-7c2b-7abc-8def-012300000001",
        "0190a5d4-7c2b-7abc-8def-012300000002",
    ]


@pytest.mark.parametrize("key", ["null", "n"])
def test_ids_of_lists_are_version_7_too(connection: Connection, key: str) -> None:
    """Guards against ids drawn once for all lists of a session, or without the time."""
    call = (
        "SELECT array_agg(id) FROM outbox_emit_many((SELECT jsonb_agg(jsonb_build_object("
        "'aggregate_type', 'o', 'aggregate_id', 1, 'event_type', 'e', 'payload', 1, "
        f"'idempotency_key', {key} + 100 * %s)) FROM generate_series(1, 100) n))"
    )
    drawn = [each for n in range(20) for each in one(connection, call, n)[0]]
    assert len(set(drawn)) == 2000
    assert {(each.version, each.variant) for each in drawn} == {(7, RFC_4122)}
    times = [milliseconds(each) for each in drawn]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_the_server_draws_its_own_where_it_can(connection: Connection) -> None:
    """Guards against the SQL function on PostgreSQL 18, which costs more than the server's own."""
    [version, default] = one(
        connection,
        "SELECT current_setting('server_version_num')::int, pg_get_expr(adbin, adrelid) "
        "FROM pg_attrdef WHERE adrelid = 'outbox'::regclass AND adnum = 1",
    )
    assert default == ("uuidv7()" if version >= 180000 else "outbox_uuidv7()")
