"""The statements of a rebase, about the rows that they judge and change: no relay runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, LiteralString
from uuid import UUID

import pytest

from outbox_pipelines.relay.lease import rebase_sql
from outbox_pipelines.relay.lease.rebase import Rebased, rebase
from tests.conftest import Outbox
from tests.relay.test_resharding import MORE_SHARDS

# An event of transaction 100, which was late at the position, has the number 7.
_EVENT: Final[LiteralString] = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, tx, seq)
VALUES ('order', 'a', 'x', '{{}}', '100', {seq})"""
_ANOTHER: Final = _EVENT.format(seq=7)
_PARKED: Final = "INSERT INTO outbox_parked SELECT *, 'failed' FROM outbox"
_OTHERS: Final = "DELETE FROM outbox"
_TODAY: Final[LiteralString] = "(clock_timestamp() AT TIME ZONE 'UTC')::date"
# All days up to this one.
_CLOSE: Final[LiteralString] = (
    "INSERT INTO outbox_days (day, state, sealed_at, closed_at) "
    "SELECT {day} - n, 'closed', now(), now() FROM generate_series(0, 9) AS n "
    "ON CONFLICT (day) DO UPDATE SET state = 'closed', sealed_at = now(), closed_at = now()"
)


def _sharded(own: str, other: str) -> str:
    is_own = "shard = outbox_shard_of('order', 'a', 2)"
    done = f"CASE WHEN {is_own} THEN '{own}' ELSE '{other}' END"
    return f"UPDATE outbox_shards SET shards = 2, done = ({done})::pg_snapshot"


@pytest.mark.parametrize(
    ("is_twice", "more"),
    [
        (True, [_ANOTHER]),
        (True, [_ANOTHER, _sharded("100:200:100", "500:500:")]),
        (True, [_PARKED, _OTHERS, _ANOTHER]),
        (
            True,
            [
                _ANOTHER,
                f"UPDATE outbox SET created_at = {_TODAY}::timestamp AT TIME ZONE 'UTC'",
                _CLOSE.format(day=f"{_TODAY} - 1"),
            ],
        ),
        (False, []),
        (False, [_EVENT.format(seq=8)]),
        (False, [_ANOTHER, "UPDATE outbox SET tx = '150'"]),
        (False, [_ANOTHER, "UPDATE outbox SET tx = '150'", _sharded("100:200:100", "100:100:")]),
        (False, [_ANOTHER, _CLOSE.format(day=_TODAY)]),
        (False, [_PARKED]),
        (False, [_PARKED, _OTHERS, _EVENT.format(seq=8)]),
    ],
)
def test_an_unpublished_event_with_the_number_of_another(
    outbox: Outbox, is_twice: bool, more: list[str]
) -> None:
    """Guards against an event that is taken for another one, and a rebase that fences relays for nothing."""
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("UPDATE outbox_shards SET done = '100:200:100'")
        connection.execute(MORE_SHARDS, [[1] if any("shards = 2" in each for each in more) else []])
        for statement in (_EVENT.format(seq=7), *more):
            connection.execute(statement.encode())
        assert connection.execute(rebase_sql.TWICE).fetchone() == (is_twice,)


_COPY: Final = "UPDATE outbox_shards SET system_identifier = 1"
_SLOT: Final = "UPDATE outbox_shards SET slot = 'a slot'"


@pytest.mark.parametrize(
    ("more", "renumbered"),
    [
        ([], 1),
        # All are published.
        (["UPDATE outbox_shards SET done = pg_current_snapshot()"], 0),
        # Nothing of a closed day changes. A table may have rows of a day without an entry in outbox_days.
        ([_CLOSE.format(day=_TODAY)], 0),
        (["DELETE FROM outbox_days"], 1),
        # The log of a slot has the old numbers; a copy has no slot.
        ([_SLOT], 0),
        ([_SLOT, _COPY], 1),
    ],
)
def test_which_events_get_new_numbers(outbox: Outbox, more: list[str], renumbered: int) -> None:
    """Guards against a number that changes although it was published, proven or logged."""
    outbox.write("a", "b")
    with outbox.connect() as connection:
        connection.execute("SELECT setval('outbox_seq', 1, false)")
        outbox.write("a")
        connection.execute("SET session_replication_role = replica")
        for statement in more:
            connection.execute(statement.encode())
        found = rebase(outbox.settings)
        assert found is not None
        assert found.renumbered == renumbered
        seqs = connection.execute("SELECT seq FROM outbox ORDER BY tx, id").fetchall()
        assert sorted(seq for (seq,) in seqs) == ([1, 2, 3] if renumbered else [1, 1, 2])


def test_nothing_of_the_old_database_is_left(outbox: Outbox) -> None:
    """Guards against a relay that finds a slot, a tick, a change or an owner of another database."""
    columns: Final = (
        "target, last_seq, tick_id, epoch, owner, slot, slot_snapshot, slot_ends, slot_error, wanted, "
        "wanted_at, barrier_paused, barrier_reached, barrier"
    )
    with outbox.connect() as connection:
        connection.execute(
            "UPDATE outbox_shards SET system_identifier = 1, database = 1, done = '7:7:', target = '9:9:', "
            "last_seq = 5, tick_id = gen_random_uuid(), epoch = 5, owner = 'a relay', slot = 'a slot', "
            "slot_snapshot = '7:7:', slot_ends = true, slot_error = 'an error', wanted = 2, "
            "wanted_at = now(), barrier_paused = true, barrier_reached = true, barrier = '9:9:'"
        )
        first = "(SELECT min(day) FROM outbox_days)"
        connection.execute(f"UPDATE outbox_days SET published = '7:7:' WHERE day = {first}".encode())
        connection.execute(
            "INSERT INTO outbox_progress (shard, shards, done, events) VALUES (0, 1, '7:7:', 1)"
        )
        assert rebase(outbox.settings) == Rebased(published=0, waiting=0)
        found = connection.execute(f"SELECT {columns} FROM outbox_shards".encode()).fetchall()
        nothing: list[Any] = [None] * 3 + [6] + [None] * 3 + [False] + [None] * 3 + [False, False, None]
        assert found == [tuple(nothing)]
        ((is_later, days, progress),) = connection.execute(
            "SELECT pg_snapshot_xmin(done) > '7', "
            "(SELECT array_agg(DISTINCT coalesce(published::text = done::text, false)) FROM outbox_days), "
            "(SELECT count(*) FROM outbox_progress) FROM outbox_shards"
        )
        # Only a closed day says what of it was published.
        assert (is_later, sorted(days), progress) == (True, [False, True], 0)
    assert rebase(outbox.settings) is None


def test_which_rows_of_a_copy_are_published(outbox: Outbox) -> None:
    """Guards against a writer's event that counts as published by its id, and a history that does not."""
    outbox.write("a")
    ahead: LiteralString = "(pg_current_xact_id()::text::bigint + {})"
    done = f"format('%s:%s:', {ahead.format(2_000_000)}, {ahead.format(2_000_000)})"
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(MORE_SHARDS, [[1]])
        # As restored: ids of the old database, which this one gives out later.
        connection.execute(f"UPDATE outbox SET tx = {ahead.format(1_000_000)}::text::xid8")
        connection.execute(
            "UPDATE outbox_shards SET shards = 2, system_identifier = 1, done = (CASE WHEN "
            f"shard = outbox_shard_of('order', 'a', 2) THEN {done} ELSE '3:3:' END)::pg_snapshot".encode()
        )
        outbox.write("a")
        assert rebase(outbox.settings) == Rebased(published=1, waiting=1)
        found = connection.execute("SELECT tx = '3' FROM outbox ORDER BY seq").fetchall()
        assert found == [(True,), (False,)]


def test_each_row_gets_its_own_transaction(outbox: Outbox) -> None:
    """Guards against an unpublished event that counts as published like another one of its id or time."""
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        now = datetime.now(UTC)
        later = now + timedelta(seconds=1)
        for tx, number, time in (("4", 1, now), ("900000000000", 1, later), ("900000000000", 2, now)):
            connection.execute(
                "INSERT INTO outbox (id, created_at, aggregate_type, aggregate_id, event_type, payload, tx) "
                "VALUES (%s, %s, 'order', 'a', 'x', '{}', %s)",
                [UUID(int=number), time, tx],
            )
        connection.execute("UPDATE outbox_shards SET system_identifier = 1, done = '9:9:'")
        assert rebase(outbox.settings) == Rebased(published=1, waiting=2)
        found = connection.execute("SELECT tx < '9'::xid8 FROM outbox ORDER BY seq").fetchall()
        assert found == [(True,), (False,), (False,)]


def test_new_numbers_are_in_order(outbox: Outbox) -> None:
    """Guards against an aggregate's events that are published in another order."""
    outbox.write("a", "a", "a")
    with outbox.connect() as connection:
        connection.execute("SELECT setval('outbox_seq', 1, false)")
        outbox.write("b", "c")
        # The number of a parked event whose day was dropped.
        connection.execute("SET session_replication_role = replica")
        connection.execute(_EVENT.format(seq=3))
        connection.execute("INSERT INTO outbox_parked SELECT *, 'failed' FROM outbox WHERE tx = '100'")
        connection.execute("DELETE FROM outbox WHERE tx = '100'")
        assert rebase(outbox.settings) == Rebased(None, None, (2, 6), 3)
        found = connection.execute("SELECT aggregate_id, seq FROM outbox ORDER BY seq").fetchall()
        assert found == [("a", 1), ("a", 2), ("b", 4), ("c", 5), ("a", 6)]


def test_a_published_event_with_the_id_of_a_running_transaction(outbox: Outbox) -> None:
    """Guards against history that is published again, because a transaction runs during the rebase."""
    outbox.write("published", "old")
    with outbox.connect() as connection, outbox.connect(autocommit=False) as running:
        ((own,),) = running.execute("SELECT pg_current_xact_id()::text")
        connection.execute("SET session_replication_role = replica")
        connection.execute("UPDATE outbox SET tx = %s::text::xid8 WHERE aggregate_id = 'published'", [own])
        connection.execute("UPDATE outbox SET tx = '4' WHERE aggregate_id = 'old'")
        connection.execute(
            "UPDATE outbox_shards SET system_identifier = 1, "
            "done = format('%%s:%%s:', %s::bigint + 1, %s::bigint + 1)::pg_snapshot",
            [own, own],
        )
        assert rebase(outbox.settings) == Rebased(published=2, waiting=0)
        ((uncovered,),) = connection.execute(
            "SELECT count(*) FROM outbox o, outbox_shards s "
            "WHERE NOT outbox_covers(s.done, s.target, s.last_seq, o.tx, o.seq)"
        )
        assert uncovered == 0


@pytest.mark.parametrize(
    ("more", "tx"),
    [
        ("seq = seq", "70"),
        ("seq = seq + 1", "3"),
        ("id = gen_random_uuid()", "3"),
        ("created_at = created_at + interval '1 us'", "3"),
    ],
)
def test_a_parked_event_has_the_transaction_of_its_own_row(
    outbox: Outbox, more: LiteralString, tx: str
) -> None:
    """Guards against a parked event that waits for the position to cover another event's transaction."""
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute(_EVENT.format(seq=7))
        connection.execute(_PARKED)
        connection.execute("UPDATE outbox SET tx = '70'")
        connection.execute(f"UPDATE outbox_parked SET {more}")
        connection.execute(rebase_sql.REBASE_PARKED)
        assert connection.execute("SELECT tx::text FROM outbox_parked").fetchall() == [(tx,)]
