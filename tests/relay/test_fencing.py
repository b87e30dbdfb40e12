"""Every statement of a relay about its shard: it changes this shard's row alone, and only in its epoch."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any, Final, LiteralString
from uuid import uuid4

import pytest

from outbox_pipelines.days.partitions import partitions_sql
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.lease import rebase_sql
from tests.conftest import Outbox, wait_until
from tests.relay.test_resharding import MORE_SHARDS

_GIVEN: Final[dict[str, Any]] = {
    "shard": 0,
    "shards": 2,
    "epoch": 5,
    "seq": 7,
    "error": "an error",
    "state": "open",
    "reason": "a reason",
    "tick": None,
    "target": None,
    "last_seq": None,
    "events": 1,
    "newest": 1,
    "open_from": "-infinity",
}
_STATEMENTS: Final = (
    *("HEARTBEAT", "CRASH_GUARD", "CALM", "FORGET_TICK", "TOP_UP_ERROR", "BREAKER", "SETTLE"),
    *("SETTLE_WITH_PROGRESS", "RELEASE", "PAUSED", "REACHED"),
)


@pytest.mark.parametrize("name", _STATEMENTS)
def test_another_shard_or_an_old_epoch_is_left_alone(outbox: Outbox, name: str) -> None:
    """Guards against a relay that lost its shard, or has another one, and changes what belongs to others."""
    statement: LiteralString = getattr(relay_sql, name)
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(
            "UPDATE outbox_shards SET shards = 2, epoch = 5, owner = 'relay', crash_guard_seq = 1, "
            "tick_id = gen_random_uuid()"
        )
        # A change to three shards has begun; for `REACHED` with a barrier.
        barrier = "done" if statement == relay_sql.REACHED else "NULL"
        connection.execute(
            f"UPDATE outbox_shards SET wanted = 3, wanted_at = now(), barrier = {barrier}".encode()
        )

        def rows() -> dict[int, tuple[Any, ...]]:
            found = connection.execute("SELECT shard, xmin::text, ctid::text, done::text FROM outbox_shards")
            return {shard: row for shard, *row in found}

        before = rows()
        given = _GIVEN | {"done": before[0][2], "ctid": before[0][1]}
        for stranger in ({"epoch": 4}, {"epoch": 6}, {"shard": 2}, {"ctid": before[1][1], "shard": 2}):
            connection.execute(statement, given | stranger)
            assert rows() == before
        connection.execute(statement, given)
        after = rows()
        assert after[1] == before[1]
        assert after[0] != before[0]


def test_what_a_relay_writes_about_itself(outbox: Outbox) -> None:
    """Guards against a status that shows another state, and an error that is written again each time."""
    shown = "SELECT breaker, breaker_reason, top_up_error, xmin::text FROM outbox_shards"
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET epoch = 5, heartbeat = '2000-01-01'")
        connection.execute(relay_sql.BREAKER, _GIVEN)
        connection.execute(relay_sql.TOP_UP_ERROR, _GIVEN)
        before = connection.execute(shown).fetchall()
        assert before[0][:3] == ("open", "a reason", "an error")
        connection.execute(relay_sql.TOP_UP_ERROR, _GIVEN)
        assert connection.execute(shown).fetchall() == before
        # Its position. Without an own tick, that of the last one in exactly_once stays.
        place = "SELECT ctid::text, pg_current_snapshot()::text FROM outbox_shards"
        ((ctid, now),) = connection.execute(place)
        tick, given = uuid4(), _GIVEN | {"done": now, "ctid": ctid}
        moved = (
            "SELECT done::text, target::text, last_seq, tick_id, heartbeat > '2000-01-02' FROM outbox_shards"
        )
        more = {"target": now, "last_seq": 7, "tick": tick}
        ((ctid,),) = connection.execute(relay_sql.SETTLE, given | more)
        assert connection.execute(moved).fetchone() == (now, now, 7, tick, True)
        connection.execute(relay_sql.SETTLE, given | {"ctid": ctid})
        assert connection.execute(moved).fetchone() == (now, None, None, tick, True)
        connection.execute("UPDATE outbox_shards SET owner = 'relay', owned_since = now()")
        connection.execute(relay_sql.RELEASE, _GIVEN)
        assert connection.execute("SELECT owner, owned_since FROM outbox_shards").fetchone() == (None, None)


def test_the_lag_of_what_is_settled(outbox: Outbox) -> None:
    """Guards against the age of another event, and one that is negative where the clock was set back."""
    outbox.write("a", "b", "c")
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        hours = "CASE aggregate_id WHEN 'a' THEN -5 WHEN 'c' THEN 5 ELSE -1 END"
        # Their ids have no time.
        connection.execute(
            "UPDATE outbox SET id = gen_random_uuid(), "
            f"created_at = now() + make_interval(hours => {hours})".encode()
        )
        connection.execute("UPDATE outbox_shards SET epoch = 5")
        for newest, hour in ((1, 5), (2, 1), (3, 0)):
            ((ctid, done),) = connection.execute("SELECT ctid::text, done::text FROM outbox_shards")
            given = _GIVEN | {"ctid": ctid, "done": done, "newest": newest}
            ((_, latency, _),) = connection.execute(relay_sql.SETTLE_WITH_PROGRESS, given)
            assert round(latency / 3600) == hour


def test_who_has_a_shard(outbox: Outbox) -> None:
    """Guards against the owner of another shard."""
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute("UPDATE outbox_shards SET owner = 'relay ' || shard, owned_since = '2026-03-01'")
        found = connection.execute(relay_sql.OWNER, {"shard": 1}).fetchall()
        assert found == [("relay 1", "2026-03-01 00:00:00 UTC")]


@pytest.mark.parametrize(
    ("more", "slot"),
    [
        ("slot_ends = false", "a slot"),
        ("slot_snapshot = NULL, slot_ends = false", None),
        ("slot_ends = true", None),
        ("shards = 2", None),
    ],
)
def test_what_changes_under_a_relay(outbox: Outbox, more: LiteralString, slot: str | None) -> None:
    """Guards against a slot that is read before it is made, or while it is dropped, or by several shards."""
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(
            "UPDATE outbox_shards SET shards = 1 + shard, slot = 'a slot', slot_snapshot = done"
        )
        connection.execute(f"UPDATE outbox_shards SET {more} WHERE shard = 0")
        ((*_, found, _, _),) = connection.execute(relay_sql.CHANGE, {"shard": 0})
        assert found == slot
        rows = connection.execute("SELECT ctid::text FROM outbox_shards ORDER BY shard").fetchall()
        (own, other) = (ctid for (ctid,) in rows)
        assert len(connection.execute(relay_sql.CHANGE_AT, {"shard": 0, "ctid": own}).fetchall()) == 1
        assert connection.execute(relay_sql.CHANGE_AT, {"shard": 0, "ctid": other}).fetchall() == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (rebase_sql, "FENCE"),
        (partitions_sql, "REOPEN"),
        (relay_sql, "UNWANT"),
        (relay_sql, "UNWANT_FORGOTTEN"),
        (relay_sql, "LOCK_EPOCHS"),
    ],
)
def test_shards_are_locked_in_their_order(outbox: Outbox, module: ModuleType, name: str) -> None:
    """Guards against two statements that change every shard, and wait for each other."""
    with (
        outbox.connect() as connection,
        outbox.connect(autocommit=False) as first,
        outbox.connect() as other,
    ):
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(
            "UPDATE outbox_shards SET shards = 2, wanted = 3, wanted_at = now() - interval '1 day'"
        )
        # In the table it is the last.
        connection.execute("UPDATE outbox_shards SET heartbeat = now() WHERE shard = 0")
        assert connection.execute("SELECT shard FROM outbox_shards ORDER BY ctid").fetchall() == [(1,), (0,)]
        first.execute("SELECT FROM outbox_shards WHERE shard = 0 FOR UPDATE")
        given = {"wanted": 3, "day": "2000-01-01"}
        thread = threading.Thread(target=other.execute, args=(getattr(module, name), given))
        thread.start()
        waits = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
        pid = other.info.backend_pid
        wait_until(lambda: connection.execute(waits, [pid]).fetchone() == (1,), what="the wait for shard 0")
        try:
            connection.execute("SELECT FROM outbox_shards WHERE shard = 1 FOR UPDATE NOWAIT")
        finally:
            first.rollback()
            thread.join()


@pytest.mark.parametrize(("module", "name"), [(rebase_sql, "FENCE"), (partitions_sql, "REOPEN")])
def test_every_relay_has_to_start_over(outbox: Outbox, module: ModuleType, name: str) -> None:
    """Guards against a relay that goes on with what it has read before."""
    with outbox.connect() as connection:
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(
            "UPDATE outbox_shards SET shards = 2, epoch = 5 + shard, owner = 'a relay', owned_since = now()"
        )
        connection.execute(getattr(module, name), {"day": "2000-01-01"})
        found = connection.execute("SELECT epoch, owner, owned_since FROM outbox_shards ORDER BY shard")
        assert found.fetchall() == [(6, None, None), (7, None, None)]
