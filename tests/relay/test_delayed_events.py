"""Delayed events: moved into the outbox by a relay when they are due; listed and canceled by an operator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest

from outbox_pipelines.errors import LockedError, SetupError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import delayed_events
from outbox_pipelines.relay.read.slot import slot_setup
from tests.conftest import Outbox, either, may_log_in, wait_until
from tests.relay import faults
from tests.relay.delayed import delay, pass_time
from tests.relay.parked import keys, numbers_by_key
from tests.relay.slot import slots
from tests.relay.threads import quick, running

LEFT = "SELECT count(*) FROM outbox_delayed"
# Each event is moved in a statement that takes a while.
SLOW = """
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(0.0005); RETURN NEW; END $$;
CREATE TRIGGER slow BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION slow()"""


def _left(outbox: Outbox) -> int:
    with outbox.connect() as connection:
        [(left,)] = connection.execute(LEFT).fetchall()
    return int(left)


def test_a_run_until_empty_publishes_what_is_due_and_nothing_else(outbox: Outbox) -> None:
    """Guards against a run that says "empty" while something is due, or waits for what is not."""
    delay(outbox, *["due"] * 600)
    delay(outbox, "later", is_due=False)
    outbox.write("at once")
    assert service.relay(outbox.settings, until_empty=True).events == 601
    assert numbers_by_key(outbox.messages()) == {"at once": [0], "due": [*range(600)]}
    assert _left(outbox) == 1


@pytest.mark.parametrize(
    ("more", "has_slot"), either(({}, False), ({}, True), ({"delivery": "exactly_once"}, False))
)
def test_a_relay_publishes_it_when_it_is_due(outbox: Outbox, more: dict[str, Any], has_slot: bool) -> None:
    """Guards against an idle relay that does not look, and later events that overtake what they wait for."""
    if has_slot:
        slots.make(outbox)
    with running(quick(outbox, **more)):
        delay(outbox, "a", is_due=False, later_events_wait=True)
        outbox.write("a", "b")
        wait_until(lambda: keys(outbox) == ["b"], what="the one that does not wait")
        with outbox.connect() as connection:
            pass_time(connection)
        wait_until(lambda: len(keys(outbox)) == 3, seconds=20, what="the others")
    assert numbers_by_key(outbox.messages()) == {"a": [0, 0], "b": [1]}
    if has_slot:
        slot_setup.remove(outbox.settings, seconds=30, say=lambda line: None)


def test_another_shard_moves_the_events_of_one_without_a_relay(outbox: Outbox) -> None:
    """Guards against one missing relay that delays the delayed events of all shards (G9)."""
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET shards = 2")
        connection.execute(
            "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
            "SELECT 1, 2, done, system_identifier, database FROM outbox_shards"
        )
    delay(outbox, *range(20))
    assert 0 < service.relay(outbox.settings, shard=1, until_empty=True).events < 20
    assert _left(outbox) == 0


def test_what_cannot_be_moved_delays_no_others(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a relay that ends, or loses its shard, because a lock or an event prevents the move."""
    delay(outbox, "due")
    with outbox.connect(autocommit=False) as other:
        # The move waits for this lock, ordinary events do not.
        other.execute("LOCK TABLE outbox_delayed IN SHARE MODE")
        with running(quick(outbox)):
            wait_until(lambda: "delayed events cannot be moved" in caplog.text, what="the log line")
            outbox.write("a", "b")
            wait_until(lambda: sorted(keys(outbox)) == ["a", "b"], what="the others")
            other.rollback()
            wait_until(lambda: sorted(keys(outbox)) == ["a", "b", "due"], what="the delayed one")
    assert "starting over" not in caplog.text
    assert "delayed events are moved again" in caplog.text


class _Shard:
    """Answers each move with a number of events or an error; a move takes 0.15 s."""

    def __init__(self, *answers: int | Exception) -> None:
        self.left = [*answers]
        self.seconds = 0.0

    def execute(self, *_: object) -> list[tuple[int]]:
        self.seconds += 0.15
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(answer,)]


def test_a_look_takes_a_moment_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a settler that moves without end, and a backlog of which a part is moved each second."""
    shard = _Shard(500, 500, 500, 499, 0)
    monkeypatch.setattr(delayed_events, "time", SimpleNamespace(monotonic=lambda: shard.seconds))
    delayed = delayed_events.DelayedEvents(cast("Shard", shard))
    left = []
    for now in (0.0, 0.1, 0.1, 1.0, 1.1):
        delayed.look(now)
        left.append(len(shard.left))
    assert left == [3, 1, 1, 1, 0]


def test_only_a_passing_error_does_not_end_the_relay() -> None:
    """Guards against a relay that goes on in an ended session, or ends because of a lock."""
    lost = ShardLostError("lost")
    lost.__cause__ = psycopg.errors.AdminShutdown("terminated")
    passing = ShardLostError("lost")
    passing.__cause__ = psycopg.errors.LockNotAvailable("locked")
    shard = _Shard(passing, psycopg.errors.InsufficientPrivilege("no right"), lost)
    delayed = delayed_events.DelayedEvents(cast("Shard", shard))
    delayed.move_all()
    delayed.move_all()
    with pytest.raises(ShardLostError):
        delayed.move_all()


@pytest.mark.extended
def test_kill_9_of_relay_and_postgresql_in_the_middle_of_moves(
    own_servers: tuple[Postgres, Kafka, Outbox],
) -> None:
    """Guards against a delayed event that is lost, or twice in the table, when a move is interrupted."""
    postgres, _, outbox = own_servers
    with outbox.connect() as connection:
        connection.execute(SLOW)
    count = 6_000
    for number in range(30):
        delay(outbox, *[number] * (count // 30), later_events_wait=number % 2 == 0)

    def has_moved(below: int) -> Callable[[], bool]:
        def is_below() -> bool:
            try:
                return _left(outbox) < below
            except psycopg.OperationalError:
                return False

        return is_below

    for kill_server in (False, True, False, True):
        left = _left(outbox)
        with faults.relay(outbox):
            wait_until(has_moved(left), seconds=60, what="a move")
            time.sleep(0.05 * (1 + kill_server))
            if kill_server:
                postgres.kill()
                postgres.start()
                wait_until(has_moved(left + 1), seconds=60, what="PostgreSQL")
        assert _left(outbox) > 0
    service.relay(outbox.settings, until_empty=True)
    wait_until(lambda: _left(outbox) == 0, what="nothing left")
    with outbox.connect() as connection:
        [(rows, ids)] = connection.execute("SELECT count(*), count(DISTINCT id) FROM outbox").fetchall()
        order = connection.execute(
            "SELECT array_agg((payload ->> 'n')::int ORDER BY seq) FROM outbox GROUP BY aggregate_id"
        ).fetchall()
    assert (rows, ids) == (count, count)
    assert order == [([*range(count // 30)],)] * 30
    assert {message.value for message in outbox.messages()} != set()


def test_the_commands(outbox: Outbox) -> None:
    """Guards against an operator who cannot see, cancel or move delayed events."""
    assert outbox.outbox("delayed", "list").stdout == "none\n"
    delay(outbox, "1", later_events_wait=True)
    delay(outbox, "2", is_due=False)
    outbox.write("1")
    shown = outbox.outbox("delayed", "list", "--limit", "2").stdout.splitlines()
    assert shown[0].endswith("  e  order 1  later events wait")
    assert shown[2] == "… and 1 more (--limit)"
    found = json.loads(outbox.outbox("delayed", "list", "--overdue", "--json").stdout)
    assert found["total"] == 2
    assert [row["last_error"] for row in found["rows"]] == [None, None]
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox ADD CONSTRAINT not_this CHECK (event_type <> 'e')")
        with outbox.connect(autocommit=False) as other:
            # Not the reason why events are left.
            other.execute("SELECT FROM outbox_delayed WHERE due > clock_timestamp() FOR UPDATE")
            moved = outbox.outbox("delayed", "move")
        assert (moved.returncode, moved.stdout) == (1, "0 events moved, 2 left: see `outbox delayed list`\n")
        listed = outbox.outbox("delayed", "list").stdout
        assert "not_this" in listed
        assert listed.endswith("  e  order 2\n")
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT not_this")
    moved = outbox.outbox("delayed", "move")
    assert (moved.returncode, moved.stdout) == (0, "2 events moved\n")
    [row] = json.loads(outbox.outbox("delayed", "list", "--json").stdout)["rows"]
    assert outbox.outbox("delayed", "cancel", row["id"]).returncode == 2
    for status, said in ((0, "1 delayed event canceled\n"), (1, "0 delayed events canceled\n")):
        canceled = outbox.outbox("delayed", "cancel", row["id"], row["id"], "--reason", "not wanted")
        assert (canceled.returncode, canceled.stdout) == (status, said)
    with outbox.connect() as connection:
        [(reason, about)] = connection.execute(
            "SELECT reason, filter -> 0 ->> 'id' FROM outbox_audit WHERE action = 'cancel'"
        ).fetchall()
    assert (reason, about) == ("not wanted", row["id"])


@pytest.mark.parametrize("is_prepared", [False, True])
def test_who_holds_an_event_is_named(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, is_prepared: bool
) -> None:
    """Guards against a command that waits without a word, and an event that is left without a reason."""
    monkeypatch.setattr(delayed_events, "LOCK_PATIENCE", 0.2)
    delay(outbox, "1")
    gid = f"holder-{outbox.topic()}"
    with outbox.connect(autocommit=False) as holder, outbox.connect() as connection:
        [(id,)] = holder.execute("SELECT id FROM outbox_delayed").fetchall()
        holder.execute("DELETE FROM outbox_delayed")
        who = f"session {holder.info.backend_pid} of role"
        if is_prepared:
            holder.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            who = f"prepared transaction {gid}: COMMIT PREPARED or"
        try:
            assert f"  in {'the ' if is_prepared else 'a transaction of '}{who}" in (
                outbox.outbox("delayed", "list", "--overdue").stdout
            )
            moved = outbox.outbox("delayed", "move")
            assert moved.returncode == 1
            assert f"0 events moved, 1 left: see `outbox delayed list`; {id} is in" in moved.stdout
            assert who in moved.stdout
            with pytest.raises(LockedError, match=rf"waited 0.2 s: {id} is in .*{who}.*Nothing was"):
                delayed_events.cancel(outbox.settings, [id], reason="why", actor="me")
        finally:
            if is_prepared:
                connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())
            else:
                holder.rollback()


def test_a_move_ends_while_events_are_left(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command that tries what cannot be moved without end, or ends too early."""
    monkeypatch.setattr(delayed_events, "_MOST", 1)
    delay(outbox, "1", "2")
    with outbox.connect() as connection:
        connection.execute("ALTER TABLE outbox ADD CONSTRAINT not_this CHECK (event_type <> 'e')")
        assert delayed_events.move(outbox.settings) == (0, 2)
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT not_this")
    assert delayed_events.move(outbox.settings) == (2, 0)


def test_a_locked_table_and_a_role_without_the_right(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of psycopg, and a session named with what its role may not see."""
    monkeypatch.setattr(delayed_events, "LOCK_PATIENCE", 0.2)
    delay(outbox, "1")
    role = f"r_{uuid4().hex}"
    settings = outbox.settings.model_copy(
        update={"dsn": psycopg.conninfo.make_conninfo(outbox.settings.dsn, user=role)}
    )
    with outbox.connect(autocommit=False) as holder, outbox.connect() as connection:
        [(id,)] = holder.execute("SELECT id FROM outbox_delayed").fetchall()
        cancel = partial(delayed_events.cancel, ids=[id], reason="why", actor="me")
        holder.execute("LOCK TABLE outbox_delayed IN SHARE MODE")
        with pytest.raises(LockedError, match=r"waited 0.2 s: canceling .* lock timeout. Nothing was"):
            cancel(outbox.settings)
        connection.execute(
            f"CREATE ROLE {role} {may_log_in(outbox.settings.dsn)};"
            f"SELECT outbox_grant_relay('{role}')".encode()
        )
        try:
            holder.execute("SET application_name = ''; DELETE FROM outbox_delayed")
            [row] = delayed_events.find(settings, overdue=True, limit=1).rows
            assert "(unnamed): wait for its end" in (row.held_by or "")
            holder.rollback()
            with pytest.raises(SetupError, match=r"permission denied .* run it as an operator"):
                cancel(settings)
        finally:
            holder.rollback()
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
