"""Who owns a shard: the session that has its lock, and none with a lock that only looks like it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import psycopg
import pytest

from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import adoption, relay_sql
from tests.conftest import Outbox, wait_until

_LOCK: Final = "a lock of tests"
_GIVEN: Final[dict[str, Any]] = {"lock": _LOCK, "shard": 0, "wanted": 2}
_TAKE: Final = "SELECT pg_advisory_lock(hashtext(%s), %s)"
_OWNED_BY: Final = "UPDATE outbox_shards SET owner = 'a relay', pid = %s"

Connection = psycopg.Connection[tuple[Any, ...]]


@contextmanager
def _waiting(outbox: Outbox) -> Iterator[int]:
    """A session that waits for the lock, which another one has."""
    with outbox.connect() as holder, outbox.connect() as connection:
        holder.execute(_TAKE, [_LOCK, 0])
        thread = threading.Thread(target=connection.execute, args=(_TAKE, [_LOCK, 0]))
        thread.start()
        waits = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
        pid = connection.info.backend_pid
        wait_until(lambda: holder.execute(waits, [pid]).fetchone() == (1,), what="the wait for the lock")
        yield pid
        holder.close()
        thread.join()


@contextmanager
def _stranger(outbox: Outbox, kind: str) -> Iterator[int]:
    """A session, idle, with a lock that has some of the numbers of the shard's."""
    dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, dbname="postgres")
    with psycopg.connect(dsn, autocommit=True) if kind == "another database" else outbox.connect() as one:
        if kind == "one key":
            one.execute("SELECT pg_advisory_lock(hashtext(%s)::bit(32)::bit(64)::bigint)", [_LOCK])
        elif kind == "another shard":
            one.execute(_TAKE, [_LOCK, 1])
        elif kind == "another outbox":
            one.execute(_TAKE, ["another lock", 0])
        elif kind == "another database":
            one.execute(_TAKE, [_LOCK, 0])
        yield one.info.backend_pid


def _answers(connection: Connection, pid: int) -> tuple[Any, ...]:
    """Who has the lock, by each query: by any session, by this one; an intruder; the owner; no owner."""

    def rows(query: str, **more: object) -> list[Any]:
        found = psycopg.ClientCursor(connection).execute(query.encode(), _GIVEN | more).fetchall()
        return [row[0] for row in found]

    return (
        rows(relay_sql.LOCK_IS_HELD) == [True],
        rows(relay_sql.LOCK_IS_HELD_BY, pid=pid) == [True],
        rows(relay_sql.INTRUDER),
        rows(relay_sql.IDLE_OWNER),
        rows(relay_sql.UNOWNED) == ["0"],
    )


@pytest.mark.parametrize(
    "kind", ["no lock", "one key", "another shard", "another outbox", "another database"]
)
def test_another_lock_is_not_the_shards(outbox: Outbox, kind: str) -> None:
    """Guards against a relay that takes the lock of another outbox, or of the application, for its own."""
    with outbox.connect() as connection, _stranger(outbox, kind) as pid:
        connection.execute(_OWNED_BY, [pid])
        assert _answers(connection, pid) == (False, False, [], [], True)
        # Its session is no intruder either.
        connection.execute(_OWNED_BY, [0])
        assert _answers(connection, pid) == (False, False, [], [], True)


def test_a_session_that_waits_for_the_lock_has_none(outbox: Outbox) -> None:
    """Guards against an owner that has lost the shard's lock and counts as if it had it."""
    with outbox.connect() as connection, _waiting(outbox) as pid:
        connection.execute(_OWNED_BY, [pid])
        held, by_it, intruders, idle, unowned = _answers(connection, pid)
        assert (held, by_it, idle, unowned) == (True, False, [], True)
        assert len(intruders) == 1
        assert intruders != [pid]
        connection.execute(_OWNED_BY, [0])
        assert _answers(connection, pid)[2] == intruders


def test_the_owner_has_it(outbox: Outbox) -> None:
    """Guards against an owner that is not seen, or is taken for an intruder; and the other way around."""
    with outbox.connect() as connection, outbox.connect() as owner, outbox.connect() as other:
        pid = owner.info.backend_pid
        owner.execute(_TAKE, [_LOCK, 0])
        connection.execute(_OWNED_BY, [pid])
        assert _answers(connection, pid) == (True, True, [], [pid], False)
        # Another shard has an owner of its own.
        with outbox.connect() as second:
            connection.execute("UPDATE outbox_shards SET shards = 2")
            connection.execute(
                "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database, owner, pid) "
                "SELECT 1, 2, done, system_identifier, database, 'another relay', %s FROM outbox_shards",
                [second.info.backend_pid],
            )
            second.execute(_TAKE, [_LOCK, 1])
            assert _answers(connection, pid)[2:4] == ([], [pid])
            owner_of = connection.execute(relay_sql.OWNER, {"shard": 1}).fetchall()
            assert [name for name, _ in owner_of] == ["another relay"]
            connection.execute("DELETE FROM outbox_shards WHERE shard = 1")
            connection.execute("UPDATE outbox_shards SET shards = 1")
        assert _answers(connection, other.info.backend_pid)[1] is False
        # A row that another session left, and one that its relay has released.
        connection.execute(_OWNED_BY, [other.info.backend_pid])
        assert _answers(connection, pid) == (True, True, [pid], [], True)
        ((_, who),) = psycopg.ClientCursor(connection).execute(relay_sql.INTRUDER, _GIVEN).fetchall()
        assert f"session {pid} of role postgres (no application name, since " in who
        connection.execute("UPDATE outbox_shards SET owner = NULL, pid = %s", [pid])
        assert _answers(connection, pid) == (True, True, [pid], [], True)
        # It does something.
        connection.execute(_OWNED_BY, [pid])
        with ExitStack() as ends:
            thread = threading.Thread(target=owner.execute, args=("SELECT pg_advisory_lock(1)",))
            connection.execute("SELECT pg_advisory_lock(1)")
            thread.start()
            ends.callback(thread.join)
            ends.callback(connection.execute, "SELECT pg_advisory_unlock(1)")
            wait_until(lambda: _answers(connection, pid)[3] == [], what="the owner's work")


def test_a_change_waits_for_relays_where_it_would_begin_now(outbox: Outbox) -> None:
    """Guards against a change of shards that waits for relays although it has begun, or ended."""
    with outbox.connect() as connection:

        def unowned(wanted: int) -> object:
            given = _GIVEN | {"wanted": wanted}
            return psycopg.ClientCursor(connection).execute(relay_sql.UNOWNED, given).fetchall()[0][0]

        assert unowned(2) == "0"
        assert unowned(1) is None
        connection.execute("UPDATE outbox_shards SET wanted = 2, wanted_at = now()")
        assert unowned(2) is None
        connection.execute("UPDATE outbox_shards SET wanted = NULL, wanted_at = NULL, slot = 'a_slot'")
        assert unowned(2) is None


def test_only_an_idle_session_that_has_not_changed_is_ended(outbox: Outbox) -> None:
    """Guards against the end of a session that works again, or of another one with the same number."""
    with outbox.connect() as connection, outbox.connect() as owner, outbox.connect() as other:
        pid = owner.info.backend_pid
        owner.execute(_TAKE, [_LOCK, 0])
        connection.execute(_OWNED_BY, [pid])
        cursor = psycopg.ClientCursor(connection)
        ((found, since),) = cursor.execute(relay_sql.IDLE_OWNER, _GIVEN).fetchall()
        assert found == pid
        given = {"pid": pid, "since": since}
        assert cursor.execute(relay_sql.IS_WORKED_FOR, given).fetchall() == [(False,)]
        own = {"pid": connection.info.backend_pid}
        assert cursor.execute(relay_sql.IS_WORKED_FOR, own).fetchall() == [(True,)]
        other.execute("SET track_activities = off")
        unknown = {"pid": other.info.backend_pid}
        assert cursor.execute(relay_sql.IS_WORKED_FOR, unknown).fetchall() == [(True,)]
        for stranger in ({"since": "earlier"}, {"pid": other.info.backend_pid}):
            assert cursor.execute(relay_sql.END_IDLE, given | stranger).fetchall() == []
        assert cursor.execute(relay_sql.END_IDLE, given).fetchall() == [(True,)]
        with pytest.raises(psycopg.OperationalError):
            owner.execute("SELECT 1")
        other.execute("SELECT 1")


def test_a_table_that_is_adopted(outbox: Outbox) -> None:
    """Guards against events that are published before the rows of the table, or a table that is not found."""
    named = (("public", "events"), ("public", "others"), ("shop", "events"))
    mappings = [Mapping(schema, name, {}, {}) for schema, name in named]
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_adopted (relation, schema, name, kept_as) "
            "VALUES (1, 'public', 'events', 'events_before')"
        )
        connection.execute(
            "CREATE FUNCTION adopted_insert() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
            "CREATE VIEW events AS SELECT 1 AS n; CREATE TRIGGER adopted_insert INSTEAD OF INSERT ON events "
            "FOR EACH ROW EXECUTE FUNCTION adopted_insert()"
        )
        for state in ("prepared", "draining", "adopted", "returning", "finished"):
            connection.execute("UPDATE outbox_adopted SET state = %s", [state])
            assert (adoption.draining(connection) is not None) is (state == "draining")
            for has_ended in (False, True):
                found = []
                for each in mappings:
                    with suppress(SetupError):
                        found.append(adoption.followed(connection, each, has_ended=has_ended).table)
                if state == "draining" or (state == "adopted" and has_ended):
                    assert found == ["events_before", "others", "events"]
                elif state in ("adopted", "finished"):
                    assert found == ["others", "events"]
                else:
                    assert found == ["events", "others", "events"]
