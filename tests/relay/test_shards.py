"""One owner at a time, and a position that only its owner moves."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Final

import psycopg
import pytest

from outbox_pipelines.core.position import Position, Snapshot
from outbox_pipelines.database import schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import postgres
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.settings import load_settings
from tests.conftest import (
    EITHER_DELIVERY,
    Outbox,
    create_database,
    drop_database,
    end_sessions,
    wait_until,
)
from tests.relay.parked import keys, write
from tests.relay.threads import quick, running
from tests.relay.topic import NOISE, create_topic


def _position(outbox: Outbox) -> Position:
    with outbox.connect() as connection:
        row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return Position(Snapshot.parse(row[0]))


def _saved(outbox: Outbox) -> str:
    with outbox.connect() as connection:
        row = connection.execute("SELECT done::text FROM outbox_shards").fetchone()
    assert row is not None
    return str(row[0])


def test_one_takes_it_and_one_waits(outbox: Outbox) -> None:
    """Guards against two active relays, and against successors that pile up."""
    owner, successor, third = (Shard(outbox.settings, 0, name) for name in ("a", "b", "c"))
    assert owner.try_take()
    assert not successor.try_take()
    assert not owner.is_awaited()
    assert successor.try_wait()
    assert owner.is_awaited()
    assert not third.try_wait()
    assert outbox_measurements.read(outbox.settings).shards[0].successor_waits
    owner.close()
    assert successor.try_take()
    assert not successor.is_awaited()
    assert third.try_wait()
    (shard,) = outbox_measurements.read(outbox.settings).shards
    assert (shard.owner, shard.successor_waits) == ("b", True)
    successor.close()
    third.close()
    assert outbox_measurements.read(outbox.settings).shards[0].owner is None


_NOTE_COMMITS: Final = """
CREATE TABLE noted (relation text, how text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO noted VALUES (TG_TABLE_NAME, current_setting('synchronous_commit'));
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER UPDATE OF done, epoch ON outbox_shards EXECUTE FUNCTION note();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON outbox_parked EXECUTE FUNCTION note();
CREATE TRIGGER note AFTER INSERT ON outbox_released EXECUTE FUNCTION note()"""


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_what_follows_from_kafka_is_committed_durably(outbox: Outbox, delivery: str) -> None:
    """Guards against a database that asks for no durable commits: after a crash it would assign the ids of
    published transactions again, and their events would count as published."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    with outbox.connect() as connection:
        connection.execute(_NOTE_COMMITS)
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off".encode())
    write(outbox, ("a", {}), ("poison", {"noise": NOISE}), ("poison", {}))
    with running(quick(outbox, delivery=delivery, max_attempts=2)):
        wait_until(lambda: sorted(keys(outbox)) == ["a", "poison"], what="the event behind the dead letter")
    with outbox.connect() as connection:
        found = connection.execute("SELECT DISTINCT relation, how FROM noted ORDER BY 1").fetchall()
    assert found == [("outbox_parked", "on"), ("outbox_released", "on"), ("outbox_shards", "on")]


@pytest.mark.extended
def test_a_silent_owner_is_ended_by_its_successor(outbox: Outbox) -> None:
    """Guards against a frozen relay that keeps the shard because the clock of the database went back."""
    settings = outbox.settings.model_copy(update={"lease_seconds": 4.0})
    owner, successor = (Shard(settings, 0, name) for name in ("a", "b"))
    assert owner.try_take()
    # The timers of the database do not fire while its clock is behind.
    for shard in (owner, successor):
        shard.execute("SET idle_session_timeout = 0", {})
    # Not while it does something, however slow the machine is.
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        owner.beat()
        successor.end_silent()
        time.sleep(0.1)
    owner.beat()

    def taken() -> bool:
        successor.end_silent()
        return successor.try_take()

    wait_until(taken, what="the successor to take the shard")
    with pytest.raises(ShardLostError):
        owner.beat()
    successor.close()


def test_measurements_after_the_clock_went_back(outbox: Outbox) -> None:
    """Guards against ages below zero, and a latency that stays what it was until the clock has caught up."""
    owner = Shard(outbox.settings, 0, "a")
    assert owner.try_take()
    outbox.write(1)
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_progress (shard, at, done, events, latency) "
            "SELECT 0, now() + ahead, pg_current_snapshot(), 60, latency "
            "FROM (VALUES (interval '-1 s', 7), (interval '1 h', 0.1)) AS given (ahead, latency)"
        )
        connection.execute(
            "UPDATE outbox_shards SET heartbeat = now() + interval '1 h', "
            "owned_since = now() + interval '1 h'"
        )
    (shard,) = outbox_measurements.read(outbox.settings).shards
    assert shard.latency_seconds == 7
    assert shard.events_per_second <= 1
    assert (shard.heartbeat_seconds, shard.owned_seconds) == (0, 0)
    owner.close()


@pytest.mark.extended
def test_a_stranger_with_the_lock_is_named(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a login that keeps every relay out while the status says that the shard has no owner."""
    with outbox.connect() as stranger, running(outbox.settings):
        wait_until(lambda: outbox_measurements.read(outbox.settings).shards[0].owner is not None)
        assert outbox_measurements.read(outbox.settings).shards[0].intruder is None
        pid = stranger.info.backend_pid
        stranger.execute("SET application_name = 'a test'")
        wait_until(lambda: _steals(stranger), what="the stranger to get the lock")
        named = f"session {pid} of role postgres \\(a test, since .* UTC\\).*pg_terminate_backend\\({pid}\\)"
        (shard,) = outbox_measurements.read(outbox.settings).shards
        assert shard.owner is None
        assert re.search(named, shard.intruder or "")
        assert shard.unowned_seconds > 0
        assert re.search(named, outbox.outbox("status").stdout)
        wait_until(lambda: re.search(named, caplog.text), what="the standby to name it")
        refused = outbox.outbox("relay", "--until-empty")
        assert refused.returncode == 1
        assert re.search(named, refused.stderr)
        stranger.execute("SELECT pg_advisory_unlock_all()")
        wait_until(lambda: outbox_measurements.read(outbox.settings).shards[0].owner is not None)


def _steals(stranger: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Ends the relay's session, and is faster than its next one."""
    stranger.execute(
        "SELECT pg_terminate_backend(pid, 1000) FROM pg_locks WHERE locktype = 'advisory' "
        "AND pid <> pg_backend_pid() "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    found = stranger.execute("SELECT pg_try_advisory_lock(hashtext('public.outbox_shards'), 0)").fetchone()
    return found == (True,)


def test_the_lock_goes_with_the_session(outbox: Outbox) -> None:
    """Guards against a lease row that outlives its owner: a killed relay would block its successor."""
    owner, successor = Shard(outbox.settings, 0, "a"), Shard(outbox.settings, 0, "b")
    assert owner.try_take()
    with outbox.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'outbox relay 0: a' AND datname = current_database()"
        )
    wait_until(successor.try_take)
    with pytest.raises(ShardLostError, match="session that owns shard 0 has ended"):
        owner.settle(_position(outbox), 1, 1)
    successor.close()


def test_a_failed_statement_is_not_called_the_end_of_the_session(outbox: Outbox) -> None:
    """Guards against an operator who looks for what ended a session that is there."""
    owner = Shard(outbox.settings, 0, "a")
    assert owner.try_take()
    with pytest.raises(ShardLostError, match="a statement of the session that owns shard 0 has failed: can"):
        owner.execute("SELECT pg_cancel_backend(pg_backend_pid())", {})
    owner.close()


def test_a_silent_owner_loses_the_shard(outbox: Outbox) -> None:
    """Guards against a stopped process whose kernel keeps its connection, and so its lock, alive."""
    quick = outbox.settings.model_copy(update={"lease_seconds": 1.0})
    owner, successor = Shard(quick, 0, "a"), Shard(quick, 0, "b")
    assert owner.try_take()
    wait_until(successor.try_take)
    with pytest.raises(ShardLostError):
        owner.settle(_position(outbox), 1, 1)
    successor.close()


def test_a_silent_successor_loses_its_place(outbox: Outbox) -> None:
    """Guards against a stopped process that waits without end: the owner could never hand over."""
    quick = outbox.settings.model_copy(update={"lease_seconds": 1.0})
    owner, successor, third = (
        Shard(outbox.settings, 0, "a"),
        Shard(quick, 0, "b"),
        Shard(outbox.settings, 0, "c"),
    )
    assert owner.try_take()
    assert successor.try_wait()
    wait_until(third.try_wait)
    with pytest.raises(ShardLostError):
        successor.try_take()
    for place in (owner, successor, third):
        place.close()


def test_an_old_epoch_cannot_move_the_position(outbox: Outbox) -> None:
    """Guards against a zombie whose session still lives (a pooler, a network that came back)."""
    with outbox.connect() as connection:
        connection.execute("VACUUM FULL outbox_shards")
    owner = Shard(outbox.settings, 0, "a")
    assert owner.try_take()
    with outbox.connect() as connection:
        # The new owner's row ends up in the very place that the old one remembers.
        connection.execute("UPDATE outbox_shards SET epoch = epoch + 1")
        connection.execute("VACUUM FULL outbox_shards")
        connection.execute("UPDATE outbox_shards SET heartbeat = now()")
    before = _saved(outbox)
    assert not owner.is_owned()
    with pytest.raises(ShardLostError, match="another relay has taken shard 0"):
        owner.settle(_position(outbox), 1, 1)
    assert _saved(outbox) == before
    owner.close()


def test_the_row_is_found_again_where_it_moved(outbox: Outbox) -> None:
    """Guards against a relay that takes VACUUM FULL for the loss of its shard."""
    owner = Shard(outbox.settings, 0, "a")
    assert owner.try_take()
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET heartbeat = now()")
        connection.execute("VACUUM FULL outbox_shards")
    position = _position(outbox)
    owner.settle(position)
    assert _saved(outbox) == str(position.done)
    owner.close()


def test_an_event_that_is_not_visible_yet_is_not_passed_over(outbox: Outbox) -> None:
    """Guards against a rejected event that is lost because a slot delivers it before its row is seen (G1)."""
    owner = Shard(outbox.settings.model_copy(update={"lease_seconds": 4.0}), 0, "a")
    assert owner.try_take()
    before = _saved(outbox)
    query = (
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "VALUES ('order', '1', 'e', '{}') RETURNING seq"
    )
    with outbox.connect(autocommit=False) as writer:
        ((seq,),) = writer.execute(query).fetchall()
        with pytest.raises(ShardLostError, match="not visible"):
            owner.settle(_position(outbox), parked=[{seq: ("retrying", "refused")}])
        assert _saved(outbox) == before
        commit = threading.Timer(0.3, writer.commit)
        commit.start()
        owner.settle(_position(outbox), parked=[{seq: ("retrying", "refused")}])
        commit.join()
    with outbox.connect() as connection:
        assert connection.execute("SELECT seq, state FROM outbox_parked").fetchall() == [(seq, "retrying")]
    owner.close()


def test_progress_rides_on_the_settle(outbox: Outbox) -> None:
    """Guards against a commit more per settle, and against a progress row for each of them."""
    owner = Shard(outbox.settings, 0, "a")
    assert owner.try_take()
    (seq,) = outbox.write(1)
    position = _position(outbox)
    settled = owner.settle(position, 1, seq)
    assert settled is not None
    assert settled.events == 1
    with outbox.connect() as connection:
        same = connection.execute("SELECT p.xmin = s.xmin FROM outbox_progress p, outbox_shards s").fetchall()
        assert same == [(True,)]
        assert [owner.settle(position, 1, seq) for _ in range(9)] == [None] * 9
        last = owner.settle(position, 1, seq, last=True)
        assert last is not None
        assert last.events == 10
        assert connection.execute("SELECT events FROM outbox_progress ORDER BY at").fetchall() == [
            (1,),
            (10,),
        ]
    owner.close()


@pytest.mark.slow
def test_a_standby_is_refused(tmp_path: Path) -> None:
    """Guards against a replica, on which running transactions look finished."""
    with postgres.Postgres(tmp_path) as server:
        settings = load_settings(dsn=server.dsn)
        schema.migrate(settings)
        server.stop()
        subprocess.run(
            ["touch", "-r", tmp_path / "cluster/data", tmp_path / "cluster/data/standby.signal"], check=True
        )
        server.start()
        with pytest.raises(SetupError, match="standby"):
            Shard(settings, 0, "a")


def test_a_copy_of_the_database_is_refused(outbox: Outbox) -> None:
    """Guards against CREATE DATABASE … TEMPLATE, which keeps the system identifier."""
    name = psycopg.conninfo.conninfo_to_dict(outbox.settings.dsn)["dbname"]
    admin = psycopg.connect(outbox.settings.dsn, dbname="postgres", autocommit=True)
    with admin, contextlib.ExitStack() as cleanup:
        end_sessions(outbox.settings.dsn)
        create_database(admin, f"{name}_copy", str(name))
        cleanup.callback(drop_database, admin, f"{name}_copy")
        dsn = psycopg.conninfo.make_conninfo(outbox.settings.dsn, dbname=f"{name}_copy")
        with pytest.raises(SetupError, match="--rebase"):
            Shard(outbox.settings.model_copy(update={"dsn": dsn}), 0, "a")
