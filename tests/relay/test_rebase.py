"""Restored dumps: never lost, at worst twice."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.postgres import Postgres, find_programs
from outbox_pipelines.relay import service
from outbox_pipelines.relay.lease.rebase import Rebased, rebase
from tests.conftest import Outbox, either, wait_until
from tests.relay.parked import numbers, write
from tests.relay.threads import quick
from tests.relay.threads import running as relaying
from tests.relay.topic import NOISE, change_topic, create_topic

_INSERT = (
    "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', %s, 'x', '{}')"
)


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second cluster, whose transaction ids are far behind or ahead of the first one's."""
    with Postgres(tmp_path_factory.mktemp("other")) as server:
        yield server.dsn


@contextlib.contextmanager
def _restored(outbox: Outbox, server: str) -> Iterator[Outbox]:
    """A dump of the test's database, restored on another server."""
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS restored WITH (FORCE)")
        admin.execute("CREATE DATABASE restored")
    dsn = psycopg.conninfo.make_conninfo(server, dbname="restored")
    programs = find_programs()
    dump = subprocess.run([programs / "pg_dump", outbox.settings.dsn], capture_output=True, check=True)
    subprocess.run(
        [programs / "psql", "-q", "-v", "ON_ERROR_STOP=1", dsn],
        input=dump.stdout,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    yield Outbox(outbox.settings.model_copy(update={"dsn": dsn}))


def _spend_transactions(dsn: str, count: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        loop = f"FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP"
        connection.execute(f"DO $$ BEGIN {loop}; END $$".encode())


@pytest.mark.parametrize("ahead", either("old", "new"))
def test_a_restored_dump_publishes_what_was_waiting_and_nothing_more(
    outbox: Outbox, other_server: str, ahead: str
) -> None:
    """Guards against ids of another database taken at their word: lost, or all published again."""
    _spend_transactions(outbox.settings.dsn if ahead == "old" else other_server, 5000)
    outbox.write("published-1", "published-2")
    service.relay(outbox.settings, until_empty=True)
    outbox.write("waiting")
    with outbox.connect() as connection:
        # A slot is not in the dump.
        connection.execute("UPDATE outbox_shards SET slot = 'shop', slot_snapshot = done")
    with _restored(outbox, other_server) as restored:
        shown = restored.outbox("status", "--check")
        assert (shown.returncode, "run `outbox relay --rebase` before" in shown.stdout) == (1, True)
        rebase(restored.settings)
        assert "--rebase" not in restored.outbox("status").stdout
        restored.write("new")
        service.relay(restored.settings, until_empty=True)
        assert rebase(restored.settings) is None
        service.relay(restored.settings, until_empty=True)
    keys = [message.key for message in outbox.messages()]
    assert sorted(keys) == ["new", "published-1", "published-2", "waiting"]


def test_a_hasty_writer_loses_nothing(outbox: Outbox, other_server: str) -> None:
    """Guards against events written after the restore and before the rebase: their ids look published."""
    _spend_transactions(outbox.settings.dsn, 20_000)
    outbox.write("published")
    service.relay(outbox.settings, until_empty=True)
    with _restored(outbox, other_server) as restored:
        restored.write("hasty")
        assert rebase(restored.settings) == Rebased(published=1, waiting=1)
        service.relay(restored.settings, until_empty=True)
    assert sorted(message.key for message in outbox.messages()) == ["hasty", "published"]


def test_a_dump_without_the_value_of_the_sequence(outbox: Outbox, other_server: str) -> None:
    """Guards against rows of a hasty writer that have the numbers of restored ones, in the same tick."""
    for n in range(3):
        write(outbox, ("published", {"n": n}))
    service.relay(outbox.settings, until_empty=True)
    for n in range(3):
        write(outbox, ("waiting", {"n": n}))
    with _restored(outbox, other_server) as restored:
        with restored.connect() as connection:
            connection.execute("SELECT setval('outbox_seq', 1, false)")
        for n in range(3, 5):
            write(restored, ("waiting", {"n": n}))
        found = rebase(restored.settings)
        assert found == Rebased(published=3, waiting=5, raised=(2, 8), renumbered=2)
        service.relay(restored.settings, until_empty=True)
    assert numbers(outbox, "waiting") == list(range(5))
    assert numbers(outbox, "published") == list(range(3))


def test_tables_without_their_rows(outbox: Outbox) -> None:
    """Guards against a stack in place of the reason, after a restore of the schema alone."""
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        connection.execute("DELETE FROM outbox_shards; DELETE FROM outbox_migrations")
    shown = outbox.outbox("status")
    assert shown.returncode == 2
    assert shown.stderr.endswith("restored without their rows: restore the dump as a whole\n")


@pytest.mark.parametrize("rows", ["", " WHERE shard = 1"])
def test_a_missing_position(outbox: Outbox, rows: str) -> None:
    """Guards against unpublished events that count as published, in a day that closes."""
    write(outbox, ("a", {"n": 1}))
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
            "SELECT 1, 2, done, system_identifier, database FROM outbox_shards; "
            "UPDATE outbox_shards SET shards = 2"
        )
        connection.execute(f"DELETE FROM outbox_shards{rows}".encode())
    for command in (("relay", "--until-empty"), ("partitions", "close")):
        done = outbox.outbox(*command)
        assert done.returncode == 2
        assert done.stderr.endswith(
            "lacks rows of outbox_shards, so its tables were restored without their "
            "rows: restore the dump as a whole\n"
        )


def test_old_ids_that_this_database_has_given_out_too(outbox: Outbox) -> None:
    """Guards against a history that is published again, if a busy database takes over an old dump."""
    outbox.write("published", "published")
    service.relay(outbox.settings, until_empty=True)
    ahead = "pg_current_xact_id()::text::bigint + {}"
    with outbox.connect() as connection:
        # As restored: ids and a position that this database reaches later.
        connection.execute("SET session_replication_role = replica")
        connection.execute(f"UPDATE outbox SET tx = ({ahead.format(100)})::text::xid8".encode())
        done = f"format('%s:%s:', {ahead.format(200)}, {ahead.format(200)})::pg_snapshot"
        connection.execute(f"UPDATE outbox_shards SET system_identifier = 1, done = {done}".encode())
    with outbox.connect() as writer, writer.transaction():
        writer.execute("SELECT pg_current_xact_id()")
        with writer.transaction():
            writer.execute(_INSERT, ["hasty"])
    _spend_transactions(outbox.settings.dsn, 300)
    assert rebase(outbox.settings) == Rebased(published=2, waiting=1)
    service.relay(outbox.settings, until_empty=True)
    assert sorted(message.key for message in outbox.messages()) == ["hasty", "published", "published"]


def test_a_rebase_under_writers_loses_nothing(outbox: Outbox) -> None:
    """Guards against a transaction that is open while the ids are rewritten."""
    with outbox.connect(autocommit=False) as late:
        late.execute("SELECT pg_current_xact_id()")
        outbox.write("a", "b")
        with outbox.connect() as connection:
            connection.execute("UPDATE outbox_shards SET system_identifier = 1")
        assert rebase(outbox.settings) is not None
        late.execute(_INSERT, ["late"])
        late.commit()
    service.relay(outbox.settings, until_empty=True)
    assert sorted(message.key for message in outbox.messages()) == ["a", "b", "late"]


@pytest.mark.extended
def test_parked_events_go_on(outbox: Outbox, other_server: str) -> None:
    """Guards against parked events that keep ids of the old database: no position would ever cover them."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}), ("b", {"n": 0}))
    _spend_transactions(outbox.settings.dsn, 50_000)
    assert service.relay(quick(outbox, max_attempts=1000), until_empty=True).unpublished == 2
    with outbox.connect() as connection:
        # A dead letter, whose day was dropped.
        connection.execute(
            "INSERT INTO outbox_parked SELECT *, 'failed' FROM outbox WHERE aggregate_id = 'b'"
        )
        connection.execute("UPDATE outbox_parked SET created_at = '2001-01-01' WHERE aggregate_id = 'b'")
    with _restored(outbox, other_server) as restored:
        rebase(restored.settings)
        with restored.connect() as connection:
            ((uncovered,),) = connection.execute(
                "SELECT count(*) FROM outbox_parked p, outbox_shards s "
                "WHERE NOT outbox_covers(s.done, s.target, s.last_seq, p.tx, p.seq)"
            )
        assert uncovered == 0
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        write(restored, ("a", {"n": 2}))
        with relaying(quick(restored)):
            wait_until(lambda: numbers(outbox, "a") == [0, 1, 2], seconds=60, what="the aggregate to go on")


def test_parked_events_have_their_numbers(outbox: Outbox) -> None:
    """Guards against events that get new numbers because others are parked."""
    outbox.write("parked")
    with outbox.connect() as connection:
        connection.execute("INSERT INTO outbox_parked SELECT *, 'waiting' FROM outbox")
        outbox.write("a", "b")
        connection.execute("UPDATE outbox_shards SET system_identifier = 1")
        before = connection.execute("SELECT aggregate_id, seq FROM outbox ORDER BY seq").fetchall()
        assert rebase(outbox.settings) == Rebased(published=0, waiting=3)
        assert connection.execute("SELECT aggregate_id, seq FROM outbox ORDER BY seq").fetchall() == before


@pytest.mark.extended
def test_a_busy_table_is_left_alone(outbox: Outbox) -> None:
    """Guards against a rebase that hangs behind a writer, and writers behind it."""
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET system_identifier = 1")
    with outbox.connect(autocommit=False) as writer:
        writer.execute(_INSERT, ["a"])
        with pytest.raises(SetupError, match="stop the writers"):
            rebase(outbox.settings)


def test_the_owner_alone_may(outbox: Outbox) -> None:
    """Guards against the door in the append-only guard standing open for writers."""
    outbox.write("a")
    with outbox.connect() as connection:
        connection.execute("CREATE ROLE rebase_intruder")
        try:
            connection.execute("GRANT UPDATE, SELECT ON outbox TO rebase_intruder")
            connection.execute("SET ROLE rebase_intruder")
            connection.execute("SET outbox.rebase = on")
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="append-only"):
                connection.execute("UPDATE outbox SET aggregate_id = 'b'")
        finally:
            connection.execute("RESET ROLE")
            connection.execute("DROP OWNED BY rebase_intruder; DROP ROLE rebase_intruder")
