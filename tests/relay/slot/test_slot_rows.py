"""The statements of slots, about rows and about the catalog: nothing reads a slot here."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import date, timedelta
from typing import Any, Final, LiteralString
from uuid import uuid4

import psycopg
import pytest

from outbox_pipelines.database import slot_reader
from outbox_pipelines.local import Stack
from outbox_pipelines.relay.read.slot import slot_sql
from tests.conftest import Outbox
from tests.relay.test_resharding import MORE_SHARDS

_WRITE: Final = """
INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, tx)
SELECT 'order', 'a', 'x', '{}', unnest(%s::text[])::xid8"""


@pytest.fixture
def rows(outbox: Outbox) -> Any:
    """A session that may write rows of any transaction."""
    with outbox.connect() as connection:
        connection.execute("SET session_replication_role = replica")
        yield connection


def test_which_transactions_have_rows(rows: psycopg.Connection[Any]) -> None:
    """Guards against a transaction that counts as without rows, so that the position passes over it."""
    rows.execute(_WRITE, [["5", "6", "9", "10", "10", "20", "30"]])
    given = {"first": "10", "end": "30", "others": ["5"], "open_from": "-infinity"}
    ((_, found),) = rows.execute(slot_sql.WITH_ROWS, given)
    assert sorted(found) == [5, 10, 20]
    closed = {"open_from": date.today() + timedelta(2)}
    ((_, found),) = rows.execute(slot_sql.WITH_ROWS, given | closed)
    assert found == []


def test_what_a_slot_must_deliver_next(rows: psycopg.Connection[Any]) -> None:
    """Guards against a slot that delivers nothing, which is not noticed: the first ones are looked at."""
    rows.execute(_WRITE, [["9", "10", "10", *(str(n) for n in range(20, 1500))]])
    given = {"first": "10", "open_from": "-infinity"}
    found = [tx for (tx,) in rows.execute(slot_sql.NOT_DELIVERED, given)]
    # A thousand rows, of which two are of one transaction.
    assert sorted(found) == [10, *range(20, 1018)]
    closed = {"open_from": date.today() + timedelta(2)}
    assert rows.execute(slot_sql.NOT_DELIVERED, given | closed).fetchall() == []


def test_the_events_of_transactions(rows: psycopg.Connection[Any]) -> None:
    """Guards against events of another transaction that are searched in the topics."""
    rows.execute(_WRITE, [["9", "10", "10", "11"]])
    given = {"transactions": ["9", "10"], "open_from": "-infinity"}
    found = [tx for tx, *_ in rows.execute(slot_sql.IDS, given)]
    assert sorted(found) == [9, 10, 10]
    closed = {"open_from": date.today() + timedelta(2)}
    assert rows.execute(slot_sql.IDS, given | closed).fetchall() == []


def test_the_end_of_the_log(outbox: Outbox) -> None:
    """Guards against an end that is not flushed, and later commits that wait for no standby."""
    with outbox.connect() as connection:
        connection.execute("SET synchronous_commit = off")
        ((end,),) = connection.execute(slot_sql.END_OF_LOG)
        ((flushed,),) = connection.execute("SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint")
        assert end <= flushed
        ((inserted,),) = connection.execute(slot_sql.INSERTED_TO)
        assert inserted >= end
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)


_SLOT: Final[LiteralString] = """
UPDATE outbox_shards SET epoch = 5, slot = 'shop', slot_snapshot = done, slot_ends = true, slot_error = 'x'"""
_SHOWN: Final = """
SELECT shard, slot, slot_snapshot::text, slot_ends, slot_error FROM outbox_shards ORDER BY shard"""
_AS_IT_WAS: Final = (0, "shop", "7:7:", True, "x")
_GIVEN: Final = {"slot": "shop", "begins": "9:9:", "shard": 0, "epoch": 5, "error": "an error"}


@pytest.mark.parametrize(
    ("statement", "before", "after"),
    [
        (slot_sql.BEGIN_SLOT, "", (0, "shop", None, False, None)),
        (slot_sql.BEGIN_SLOT, "slot = 'other'", (0, "shop", None, False, None)),
        (slot_sql.BEGIN_SLOT, "shards = 2", _AS_IT_WAS),
        (slot_sql.BEGIN_SLOT, "wanted = 2", _AS_IT_WAS),
        (slot_sql.SLOT_IS_MADE, "", (0, "shop", "9:9:", True, "x")),
        (slot_sql.SLOT_IS_MADE, "shards = 2", _AS_IT_WAS),
        (slot_sql.SLOT_IS_MADE, "slot = 'other'", (0, "other", "7:7:", True, "x")),
        (slot_sql.END_SLOT, "slot_ends = false", _AS_IT_WAS),
        (slot_sql.NO_SLOT, "", (0, None, None, False, None)),
        (slot_sql.SLOT_ERROR, "", (0, "shop", "7:7:", True, "an error")),
        (slot_sql.SLOT_ERROR, "epoch = 6", _AS_IT_WAS),
    ],
)
def test_what_is_written_about_a_slot(
    outbox: Outbox, statement: LiteralString, before: LiteralString, after: tuple[Any, ...]
) -> None:
    """Guards against a slot that is read before it is made, or after it has ended, or with several shards."""
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET done = '7:7:'")
        connection.execute(_SLOT)
        if before:
            connection.execute(f"UPDATE outbox_shards SET {before}")
        connection.execute(statement, _GIVEN)
        assert connection.execute(_SHOWN).fetchall() == [after]


def test_without_a_slot_nothing_is_written(outbox: Outbox) -> None:
    """Guards against an error of a slot that is kept when the slot is gone, and against another shard's."""
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET epoch = 5")
        before = connection.execute("SELECT xmin::text, slot_ends, slot_error FROM outbox_shards").fetchall()
        for statement in (slot_sql.SLOT_ERROR, slot_sql.END_SLOT, slot_sql.NO_SLOT):
            connection.execute(statement, _GIVEN)
        shown = "SELECT xmin::text, slot_ends, slot_error FROM outbox_shards"
        assert connection.execute(shown).fetchall() == before
        connection.execute(MORE_SHARDS, [[1]])
        connection.execute(_SLOT)
        connection.execute(slot_sql.SLOT_ERROR, _GIVEN)
        assert [row[-1] for row in connection.execute(_SHOWN)] == ["an error", "x"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("owner = 'a relay', heartbeat = clock_timestamp() - interval '10 s'", [(False, True)]),
        ("owner = 'a relay', heartbeat = clock_timestamp() - interval '50 s'", [(False, False)]),
        ("heartbeat = clock_timestamp()", [(False, False)]),
        ("slot = NULL, slot_snapshot = NULL, slot_ends = false, slot_error = NULL", []),
    ],
)
def test_whether_a_slot_is_read(
    outbox: Outbox, more: LiteralString, expected: list[tuple[bool, bool]]
) -> None:
    """Guards against a cut-over that waits for a relay which does not run, or for a slot that is not read."""
    slot = f"rows_{uuid4().hex}"
    made = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', %s)"
    with outbox.connect() as connection, outbox.connect() as reader:
        # Another slot is read.
        reader.execute(made, [f"rows_{uuid4().hex}", True])
        connection.execute(made, [slot, False])
        try:
            connection.execute(_SLOT)
            connection.execute("UPDATE outbox_shards SET slot = %s", [slot])
            connection.execute(f"UPDATE outbox_shards SET {more}")
            assert connection.execute(slot_sql.IS_READ).fetchall() == expected
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])


@pytest.mark.parametrize(
    ("statement", "ends", "keeps"),
    [
        (slot_sql.END_READER, "slot_snapshot = done", ["slot_snapshot = NULL", "slot_ends = true"]),
        (slot_sql.END_MAKER, "slot_snapshot = NULL", ["slot_snapshot = done"]),
    ],
    ids=["reader", "maker"],
)
def test_whose_session_is_ended(
    outbox: Outbox, stack: Stack, statement: LiteralString, ends: LiteralString, keeps: list[LiteralString]
) -> None:
    """Guards against the end of a reader that another relay or another command needs."""
    made = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', true)"
    own, foreign = f"rows_{uuid4().hex}", f"rows_{uuid4().hex}"
    with (
        outbox.connect() as connection,
        outbox.connect() as reader,
        psycopg.connect(stack.dsn, autocommit=True) as elsewhere,
    ):
        # Each is read by its session as long as that lives.
        reader.execute(made, [own])
        elsewhere.execute(made, [foreign])

        def end(slot: str, named: str, more: LiteralString) -> None:
            connection.execute("UPDATE outbox_shards SET slot = %s, slot_snapshot = done", [named])
            connection.execute("UPDATE outbox_shards SET slot_ends = false")
            connection.execute(f"UPDATE outbox_shards SET {more}")
            connection.execute(statement, {"slot": slot})

        for more in keeps:
            end(own, own, more)
        end(own, "another", ends)
        end(foreign, foreign, ends)
        reader.execute("SELECT")
        elsewhere.execute("SELECT")
        if statement == slot_sql.END_READER:
            end("another", own, ends)
            reader.execute("SELECT")
        end(own, own, ends)
        with pytest.raises(psycopg.errors.AdminShutdown):
            reader.execute("SELECT")


def test_which_publications_are_of_the_whole_outbox(outbox: Outbox) -> None:
    """Guards against a slot whose publication leaves out columns, rows or the outbox itself."""
    ours: Final = "WITH (publish = 'insert', publish_via_partition_root = true)"
    with outbox.connect() as connection:
        if connection.info.server_version < 150000:
            pytest.skip("columns and rows of a publication: PostgreSQL 15")
        connection.execute("CREATE TABLE other (id int PRIMARY KEY, name text)")
        connection.execute("CREATE SCHEMA elsewhere CREATE TABLE outbox (id int PRIMARY KEY, name text)")
        for name, what in {
            "whole": f"FOR TABLE outbox, other (id) {ours}",
            "columns": f"FOR TABLE outbox (id, seq, tx, created_at) {ours}",
            "some_rows": f"FOR TABLE outbox WHERE (seq > 0) {ours}",
            "another": f"FOR TABLE other {ours}",
            "same_name": f"FOR TABLE elsewhere.outbox {ours}",
            "deletes": "FOR TABLE outbox WITH (publish = 'delete')",
        }.items():
            connection.execute(f"CREATE PUBLICATION {name} {what}".encode())

        def found(name: str) -> list[tuple[bool, bool, bool]]:
            return connection.execute(slot_sql.PUBLICATION, {"slot": name}).fetchall()

        assert found("whole") == [(True, True, True)]
        assert found("columns") == [(True, True, False)]
        assert found("some_rows") == [(True, True, False)]
        assert found("another") == [(True, True, False)]
        assert found("same_name") == [(True, True, False)]
        assert found("deletes") == [(False, False, False)]
        assert found("missing") == []


def test_what_setup_looks_at(outbox: Outbox) -> None:
    """Guards against a slot with several shards, and against another slot or role that is looked at."""
    role = f"rows_{uuid4().hex}"
    with outbox.connect() as connection, outbox.connect() as other:
        for row, has_shards in (("wanted = NULL", False), ("wanted = 2", True), ("shards = 2", True)):
            connection.execute("UPDATE outbox_shards SET shards = 1, wanted = NULL")
            connection.execute(f"UPDATE outbox_shards SET {row}".encode())
            ((level, _, found),) = connection.execute(slot_sql.FACTS)
            assert (level, found) == ("logical", has_shards)
        for session, slot in ((connection, f"{role}_a"), (other, f"{role}_b")):
            session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', true)", [slot])
        slots = connection.execute(slot_sql.EXISTING_SLOT, {"slot": f"{role}_a"}).fetchall()
        assert slots == [(connection.info.dbname, "pgoutput", False)]
        connection.execute(f"CREATE ROLE {role}".encode())
        try:
            assert slot_reader.barred_role(connection) is None
            for attributes, barred in (("NOREPLICATION", role), ("REPLICATION", None)):
                connection.execute(f"ALTER ROLE {role} {attributes}; SET ROLE {role}".encode())
                assert slot_reader.barred_role(connection) == barred
                connection.execute("RESET ROLE")
        finally:
            connection.execute(f"DROP ROLE {role}".encode())


def test_what_a_new_slot_waits_for(outbox: Outbox) -> None:
    """Guards against a message that names a session for which no slot waits, or not the oldest one."""
    # Other tests have transactions, too: not the first row, but the first 199.
    statement = f"{slot_sql.LONGEST_TRANSACTIONS}99".encode()
    with ExitStack() as stack:
        reading, first, second, maker, own = (
            stack.enter_context(outbox.connect(autocommit=False)) for _ in range(5)
        )
        reading.execute("SELECT")
        first.execute("SET application_name = ''")
        for each in (first, second, maker, own):
            each.execute("SELECT pg_current_xact_id()")
        pids = {each.info.backend_pid for each in (reading, first, second, maker, own)}
        rows = own.execute(statement, {"pid": maker.info.backend_pid}).fetchall()
        found = [(pid, application) for pid, _, application, _ in rows if pid in pids]
        assert [pid for pid, _ in found] == [first.info.backend_pid, second.info.backend_pid]
        assert found[0][1] == "no application name"


def test_publications_like_ours(outbox: Outbox) -> None:
    """Guards against a publication of another program that is shown as one which may be dropped."""
    ours: Final = "publish_via_partition_root = true"
    with outbox.connect() as connection:
        connection.execute("CREATE TABLE other (id int)")
        connection.execute("CREATE SCHEMA elsewhere CREATE TABLE outbox (id int)")
        connection.execute("CREATE PUBLICATION theirs_elsewhere FOR TABLE elsewhere.outbox")
        assert connection.execute(slot_sql.OLDEST_PUBLICATION).fetchall() == []
        for name, what in {
            "outbox_other": f"FOR TABLE other WITH (publish = 'insert', {ours})",
            "outbox_two": f"FOR TABLE outbox WITH (publish = 'insert', {ours})",
            "outbox_one": f"FOR TABLE outbox WITH (publish = 'insert', {ours})",
            "outbox_known": f"FOR TABLE outbox WITH (publish = 'insert', {ours})",
            "theirs": f"FOR TABLE outbox WITH (publish = 'insert', {ours})",
            "outbox_both": f"FOR TABLE outbox, other WITH (publish = 'insert', {ours})",
            "outbox_leaves": "FOR TABLE outbox WITH (publish = 'insert')",
            "outbox_none": f"FOR TABLE outbox WITH (publish = '', {ours})",
            "outbox_update": f"FOR TABLE outbox WITH (publish = 'insert, update', {ours})",
            "outbox_delete": f"FOR TABLE outbox WITH (publish = 'insert, delete', {ours})",
            "outbox_truncate": f"FOR TABLE outbox WITH (publish = 'insert, truncate', {ours})",
        }.items():
            connection.execute(f"CREATE PUBLICATION {name} {what}".encode())
        assert connection.execute(slot_sql.PUBLICATION_OWNER, {"slot": "missing"}).fetchall() == []
        given = {"pattern": "^outbox_", "names": ["outbox_known"]}
        found = connection.execute(slot_sql.SIMILAR_PUBLICATIONS, given).fetchall()
        assert found == [("outbox_one",), ("outbox_two",)]
        assert connection.execute(slot_sql.OLDEST_PUBLICATION).fetchall() == [("outbox_two",)]
        # Of partitions alone.
        for (name,) in connection.execute(
            "SELECT pubname FROM pg_publication WHERE pubname <> 'outbox_other'"
        ):
            connection.execute(f"DROP PUBLICATION {name}".encode())
        assert connection.execute(slot_sql.OLDEST_PUBLICATION).fetchall() == []
        connection.execute("CREATE TABLE halves (id int) PARTITION BY RANGE (id)")
        connection.execute("CREATE TABLE half PARTITION OF halves FOR VALUES FROM (0) TO (9)")
        connection.execute("CREATE PUBLICATION of_half FOR TABLE half")
        assert connection.execute(slot_sql.OLDEST_PUBLICATION).fetchall() == []
        leaf = connection.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox'::regclass LIMIT 1"
        ).fetchone()
        assert leaf is not None
        connection.execute(f"CREATE PUBLICATION of_leaf FOR TABLE {leaf[0]}".encode())
        assert connection.execute(slot_sql.OLDEST_PUBLICATION).fetchall() == [("of_leaf",)]
