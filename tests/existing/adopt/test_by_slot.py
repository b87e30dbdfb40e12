"""A table that Debezium publishes: nothing is lost, repeated or reordered there and back."""

from __future__ import annotations

import json
import threading
import time
import tomllib
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy import JSON, Column, String, Uuid, create_engine, orm

from outbox_pipelines.database import schema, slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing.adopt import drain, planning, steps, unsent
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.drain import Rest
from outbox_pipelines.local import Stack
from outbox_pipelines.relay import service
from outbox_pipelines.relay.read.slot import behind
from outbox_pipelines.relay.read.slot.slot_cutover import read
from outbox_pipelines.settings import Settings
from tests.conftest import fresh_database, wait_until
from tests.existing.adopt.conftest import SCHEMA, Make
from tests.existing.adopt.debezium_table import (
    DDL,
    PARTITIONED,
    PUBLICATION,
    QUARKUS,
    Published,
    insert,
    insert_and_delete,
    published,
)
from tests.relay.slot.readers import leaving

_READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"


@pytest.fixture
def table(make: Make) -> Iterator[Published]:
    with published(make) as made:
        yield made


def _switch(table: Published) -> None:
    settings = table.adopted.settings
    steps.prepare(settings)
    steps.switch(settings, list(planning.plan(settings).judged.consequences), seconds=30, say=print)


def _drain(table: Published, what: Rest = Rest.WAIT, *, seconds: float = 0) -> int:
    return steps.drain(table.adopted.settings, seconds=seconds, say=print, rest=what)


@pytest.mark.extended
def test_there_and_back(table: Published) -> None:
    """Guards against a gap, a repetition or another order where the publisher changes (G1, G2)."""
    table.write(0, 1)
    table.write(2, keep=True)
    _switch(table)
    table.write(3, 4)
    table.publish(1)
    with pytest.raises(NotReadyError, match="missing in Kafka: 2 events of before the switch"):
        _drain(table)
    with pytest.raises(NotReadyError, match="outbox adopt drain"):
        table.adopted.back()
    with pytest.raises(service.ShardOwnedError):
        service.relay(
            table.adopted.settings.model_copy(update={"table": {}}),
            until_empty=True,
            standby=service.Standby.REFUSE,
        )
    assert table.numbers() == [0]
    table.publish(confirm=False)
    assert _drain(table) == 0
    assert table.adopted.state() == "adopted"
    # The check slot_log counts it.
    found = read(table.adopted.settings.model_copy(update={"table": {}}))
    assert [(other.slot, other.retained_bytes > 0) for other in found.others] == [(table.slot, True)]
    table.write(5)
    table.adopted.relay()
    assert table.numbers() == [0, 1, 2, 3, 4, 5]
    table.write(6)
    table.adopted.back()
    table.write(7, 8)
    # What it had published and not confirmed, Debezium knows from its own offsets.
    assert table.publish(confirm=False) == 4
    assert table.numbers() == [0, 1, 2, 3, 4, 5, 6, 1, 2, 7, 8]


def test_what_is_confirmed_needs_no_look(table: Published) -> None:
    """Guards against a drain that needs the topics, or the right to read slots, without a reason."""
    table.write(0)
    _switch(table)
    table.write(1)
    # The commit of the switch and what follows, as heartbeats of Debezium confirm it.
    with table.adopted.connect() as connection:
        advance = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
        connection.execute(advance, [table.slot])
    with table.read():
        assert _drain(table) == 0
    assert table.adopted.state() == "adopted"
    assert table.numbers() == []


def test_the_position_is_behind_every_row(table: Published) -> None:
    """Guards against a position that was read before the last writer has committed."""
    steps.prepare(table.adopted.settings)
    with ThreadPoolExecutor(1) as pool:
        with table.adopted.connect() as connection, connection.transaction():
            insert(connection, "7", "order.placed", {"n": 0})
            switched = pool.submit(_switch, table)
            # Copies of one database have relations of one number.
            waits = (
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'public.outbox'::regclass "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            wait_until(lambda: table.one(waits), what="a switch that waits")
        switched.result(600)
    table.write(1)
    # An insert (I) of a transaction that committed behind the position.
    late = table.one(
        "WITH changes AS (SELECT * FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, "
        f"'proto_version', '1', 'publication_names', '{PUBLICATION}')) "
        f"SELECT count(*) FROM changes WHERE lsn >= (SELECT switched_lsn FROM {SCHEMA}.outbox_adopted) "
        "AND xid::text IN (SELECT xid::text FROM changes WHERE get_byte(data, 0) = 73)"
    )
    assert late == 0
    assert table.publish() == 1


@pytest.mark.extended
def test_a_connector_that_runs(table: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a look into a slot, or a way back, while another program publishes from it."""
    monkeypatch.setattr(slot_reader, "LEAVE_SECONDS", 0.1)
    table.write(0)
    _switch(table)
    with table.read(), pytest.raises(NotReadyError, match="does not confirm its last transaction before a l"):
        _drain(table)
    table.publish(confirm=False)
    _drain(table)
    with table.read():
        with pytest.raises(NotReadyError, match="would publish new rows"):
            table.adopted.back()
        assert table.adopted.state() == "adopted"


@pytest.mark.extended
def test_a_connector_that_was_just_stopped(table: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against commands that refuse, or fail, because the server still has a reader that has ended."""
    table.write(0, keep=True)
    _switch(table)
    settings = table.adopted.settings
    stopped = (settings, table.slot, PUBLICATION, monkeypatch)
    with leaving(*stopped) as waited_for:
        assert _drain(table, Rest.SKIP) == 0
    assert waited_for
    with leaving(*stopped) as waited_for:
        table.adopted.back()
    assert waited_for
    _switch(table)
    table.publish()
    # From here on the slot's reader can also begin between the look and the reading.
    read = slots.read
    with leaving(*stopped) as waited_for, monkeypatch.context() as patch:
        patch.setattr(slots, "read", lambda *given: replace_reader(read(*given)))
        assert _drain(table) == 0
    assert waited_for
    with leaving(*stopped) as waited_for:
        steps.finish(settings.model_copy(update={"archive": "none"}), drop=True, seconds=30, say=print)
    assert waited_for
    assert not table.has_slot()


def replace_reader(slot: slots.Slot | None) -> slots.Slot | None:
    """The slot before it had a reader."""
    return None if slot is None else replace(slot, reader=None)


@pytest.mark.extended
def test_commands_name_a_connector_that_runs(table: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error that names nothing which can be stopped."""
    monkeypatch.setattr(slot_reader, "LEAVE_SECONDS", 0.1)
    named = rf"process \d+ \(debezium, role \w+.*\) reads (it|the slot {table.slot})"
    table.write(0)
    _switch(table)
    with table.read():
        for what in (Rest.WAIT, Rest.SKIP):
            with pytest.raises(NotReadyError, match=named):
                _drain(table, what)
    table.publish(confirm=False)
    _drain(table)
    settings = table.adopted.settings.model_copy(update={"archive": "none"})
    with table.read():
        with pytest.raises(NotReadyError, match=named):
            table.adopted.back()
        with pytest.raises(NotReadyError, match=named):
            steps.finish(settings, drop=True, seconds=30, say=print)


@pytest.mark.extended
def test_a_connector_that_is_started_on_the_way_back(
    table: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against new rows of the table that are published before the events of the outbox."""
    _switch(table)
    table.publish(confirm=False)
    _drain(table)
    table.write(0)
    publish, tried = drain.publish_due, []

    def start(*given: Any) -> None:
        table.write(1)
        with pytest.raises(psycopg.errors.ObjectInUse), table.read():
            pass
        tried.append(table.adopted.state())
        publish(*given)
        if len(tried) == 1:
            table.one(f"SELECT pg_terminate_backend(({_READER}))")
            wait_until(lambda: table.one(_READER) is None, what="a slot that is free")

    monkeypatch.setattr(steps, "publish_due", start)
    with pytest.raises(NotReadyError, match="has ended the session that held the slot"):
        table.adopted.back()
    assert (tried, table.adopted.state()) == (["returning"], "returning")
    table.adopted.back()
    assert table.publish() == 1
    assert table.numbers() == [0, 1]


@pytest.mark.extended
@pytest.mark.parametrize("ddl", [DDL, PARTITIONED, QUARKUS], ids=["debezium", "partitioned", "quarkus"])
def test_the_rest_is_published_in_place_of_the_connector(make: Make, ddl: str) -> None:
    """Guards against events that a connector which cannot continue has not published."""
    with published(make, ddl=ddl) as table:
        _take_over(table)


def _take_over(table: Published) -> None:
    ids = table.write(0, 1)
    ids += table.write(2, keep=True)
    table.publish(1)
    _switch(table)
    ids += table.write(3)
    assert _drain(table, Rest.PUBLISH, seconds=30) == 2
    table.adopted.relay()
    assert table.numbers() == [0, 1, 2, 3]
    assert [message.headers["id"] for message in table.adopted.messages()] == ids
    # The connector gets none of them again.
    assert table.publish() == 0
    table.adopted.back()
    table.write(4)
    assert table.publish() == 1


@pytest.mark.extended
def test_relays_may_start_while_the_rest_is_published(
    table: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against relays that take the table of the rest for damage of the schema."""
    publish, found = drain._publish_rest, []

    def checked(settings: Settings, *given: Any, **named: Any) -> int:
        found.append((drain._has_rest(given[0]), schema.drift(settings)))
        return publish(settings, *given, **named)

    monkeypatch.setattr(drain, "_publish_rest", checked)
    table.write(0)
    _switch(table)
    assert _drain(table, Rest.PUBLISH, seconds=30) == 1
    assert found == [(True, [])]
    assert table.numbers() == [0]


@pytest.mark.extended
def test_a_topic_that_takes_long_to_read(table: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slot that the server takes back while a large topic is looked through."""
    found_in = behind.found_in

    def slow(*given: Any) -> set[str]:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            given[-1]()
            threading.Event().wait(0.1)
            assert table.one("SELECT active FROM pg_replication_slots WHERE slot_name = %s")
        return found_in(*given)

    monkeypatch.setattr(unsent, "found_in", slow)
    table.write(0)
    with table.adopted.connect() as connection:
        database = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET wal_sender_timeout = '800ms'").format(database))
    _switch(table)
    assert _drain(table, Rest.PUBLISH, seconds=30) == 1


@pytest.mark.extended
def test_a_slot_that_is_gone(table: Published) -> None:
    """Guards against an outbox that waits for a slot that cannot say anything any more."""
    table.write(0)
    _switch(table)
    table.one("SELECT pg_drop_replication_slot(%s)")
    with pytest.raises(SetupError, match=r"no slot debezium_\w+ .* `outbox adopt drain --rest skip`"):
        _drain(table)
    assert _drain(table, Rest.SKIP) == 0
    assert table.adopted.state() == "adopted"
    with pytest.raises(SetupError, match="SELECT pg_create_logical_replication_slot"):
        table.adopted.back()
    table.one("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')::text")
    table.adopted.back()
    table.write(1)
    assert table.publish() == 1


@pytest.mark.extended
def test_deletes(table: Published) -> None:
    """Guards against writers and clean-up jobs that fail, or find no end, on the view."""
    (old,) = table.write(0, keep=True)
    _switch(table)
    with table.adopted.connect() as connection:
        with connection.transaction():
            (new,) = (insert(connection, "7", "order.placed", {"n": 1}),)
            assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (2,)
            assert connection.execute("DELETE FROM outbox WHERE id = %s", [new]).rowcount == 1
        assert connection.execute("DELETE FROM outbox WHERE id = %s", [old]).rowcount == 1
        assert connection.execute("DELETE FROM outbox").rowcount == 0
        with connection.transaction(force_rollback=True):
            insert(connection, "7", "order.placed", {"n": 2})
            with pytest.raises(psycopg.errors.FeatureNotSupported):
                connection.execute("UPDATE outbox SET type = 'x'")
    table.publish()
    _drain(table)
    table.adopted.relay()
    assert table.numbers() == [0, 1]


@pytest.mark.extended
def test_a_writer_with_its_own_role(table: Published) -> None:
    """Guards against a writer that may insert and delete, and no more, until the switch only."""
    role = f"writer_{uuid.uuid4().hex[:8]}"
    with table.adopted.connect() as connection:
        connection.execute(f"CREATE ROLE {role}".encode())
        try:
            grant = f"GRANT INSERT, DELETE, SELECT ON outbox TO {role}"
            connection.execute(grant.encode())
            _switch(table)
            connection.execute(f"SET ROLE {role}".encode())
            insert_and_delete(connection, "7", "order.placed", {"n": 0})
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}".encode())
    _drain(table)
    table.adopted.relay()
    assert table.numbers() == [0]


@pytest.mark.extended
def test_an_orm_that_deletes_at_once(table: Published) -> None:
    """Guards against a writer that misses the row which it deletes."""
    _switch(table)
    base = orm.declarative_base()

    class Row(base):  # type: ignore[misc, valid-type]
        __tablename__ = "outbox"
        id = Column(Uuid, primary_key=True)
        aggregatetype, aggregateid, type = Column(String), Column(String), Column(String)
        payload = Column(JSON)

    engine = create_engine("postgresql+psycopg://", creator=table.adopted.connect_to_write)
    with warnings.catch_warnings(), orm.Session(engine) as session:
        # SQLAlchemy warns if another number of rows was deleted.
        warnings.simplefilter("error")
        for n in range(3):
            row = Row(id=uuid.uuid4(), aggregatetype="Order", aggregateid="7", type="t", payload={"n": n})
            session.add(row)
            session.flush()
            session.delete(row)
            session.flush()
        session.commit()
    engine.dispose()
    _drain(table)
    table.adopted.relay()
    assert table.numbers() == [0, 1, 2]


@pytest.mark.extended
def test_finish_drops_the_slot(table: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a slot that is forgotten, and keeps the log of the server."""
    monkeypatch.setattr(slot_reader, "LEAVE_SECONDS", 0.1)
    table.write(0, keep=True)
    _switch(table)
    table.publish()
    _drain(table)
    archive = {"archive": "none"}
    settings = table.adopted.settings.model_copy(update=archive)
    with table.read(), pytest.raises(NotReadyError, match="remove the connector"):
        steps.finish(settings, drop=True, seconds=10, say=print)
    assert table.one("SELECT to_regclass('public.outbox_adopted') IS NOT NULL")
    said = steps.finish(settings, drop=True, seconds=10, say=print)
    assert said[0] == f"slot {table.slot} is dropped"
    assert not table.has_slot()
    table.write(1)
    table.adopted.relay()
    assert table.numbers() == [0, 1]


@pytest.mark.extended
def test_a_publication_of_all_tables(make: Make) -> None:
    """Guards against a connector that publishes new events as well, and against a slot that others need."""
    with published(make, publication="FOR ALL TABLES") as table:
        table.write(0)
        steps.prepare(table.adopted.settings)
        with pytest.raises(SetupError, match="the connector must have table"):
            steps.switch(table.adopted.settings, [], seconds=10, say=print)
        name = f"publication:{PUBLICATION}"
        assert f"--accept {name}: " in table.adopted.run("adopt", "plan")
        steps.switch(table.adopted.settings, [name], seconds=10, say=print)
        table.write(1)
        assert _drain(table, Rest.PUBLISH, seconds=30) == 1
        table.adopted.relay()
        assert table.numbers() == [0, 1]
        settings = table.adopted.settings.model_copy(update={"archive": "none"})
        said = steps.finish(settings, drop=True, seconds=10, say=print)
        assert "was not dropped, because publication dbz_publication has other tables" in said[0]
        assert table.has_slot()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("SELECT pg_drop_replication_slot(%(slot)s)", "the server has no slot debezium_"),
        (
            "SELECT pg_drop_replication_slot(%(slot)s), pg_create_physical_replication_slot(%(slot)s)",
            "is a physical one",
        ),
        (f"DROP PUBLICATION {PUBLICATION}", "no publication has the inserts of public.outbox"),
        (f"ALTER PUBLICATION {PUBLICATION} SET (publish = 'update')", "no publication has the inserts"),
        ("ALTER TABLE outbox ALTER id TYPE text", "ids of the append-only outbox are UUIDs"),
    ],
)
def test_what_cannot_be_adopted(table: Published, change: str, words: str) -> None:
    """Guards against a switch after which nothing could say what is published."""
    with table.adopted.connect() as connection:
        connection.execute(change.encode(), {"slot": table.slot})
    code, said = table.adopted.refuse("adopt", "prepare")
    assert (code, words in said) == (2, True), said


@pytest.mark.extended
def test_a_slot_that_cannot_be_looked_into(table: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a drain that ends with an error of the server where waiting is enough."""
    monkeypatch.setattr(slots, "PLUGIN", "decoderbufs")
    table.write(0)
    _switch(table)
    with pytest.raises(NotReadyError, match="has the plugin pgoutput, and no session reads it"):
        _drain(table)
    with table.adopted.connect() as connection:
        connection.execute(f"DROP PUBLICATION {PUBLICATION}".encode())
    monkeypatch.undo()
    with pytest.raises(SetupError, match=r"no publication has the inserts of public\.outbox_adopted"):
        _drain(table)
    table.one("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())::text")
    _drain(table)
    assert table.adopted.state() == "adopted"


def test_a_slot_of_another_database(table: Published, stack: Stack) -> None:
    """Guards against a position that another database's reader has confirmed."""
    with fresh_database(stack.dsn) as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        other = f"elsewhere_{uuid.uuid4().hex[:12]}"
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [other])
        described = table.adopted.settings.table | {"slot": other}
        code, said = table.adopted.refuse("adopt", "prepare", OUTBOX_TABLE=json.dumps(described))
        connection.execute("SELECT pg_drop_replication_slot(%s)", [other])
    assert (code, "belongs to the database" in said) == (2, True), said


@pytest.mark.extended
def test_the_file(table: Published) -> None:
    """Guards against a description that is not found out, or that a relay takes."""
    described = table.adopted.run("table", "describe", "public.outbox", OUTBOX_TABLE="")
    assert f'slot = "{table.slot}"' in described
    assert "order" not in described
    given = {"OUTBOX_TABLE": json.dumps(tomllib.loads(described)["table"])}
    assert "nothing to correct" in table.adopted.run("table", "check", **given)
    for words in (("relay",), ("status",)):
        code, said = table.adopted.refuse(*words, **given)
        assert (code, f"what reads the slot {table.slot} publishes public.outbox" in said) == (2, True), said
    plan = table.adopted.run("adopt", "plan", **given)
    assert "counts the row" in plan
    assert "no session reads the slot" in plan


@pytest.mark.extended
def test_a_role_that_may_not_read_slots(table: Published) -> None:
    """Guards against an error of the server in place of what to do."""
    table.write(0)
    _switch(table)
    role = f"member_{uuid.uuid4().hex[:8]}"
    with table.adopted.connect() as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'".encode())
        connection.execute(f"GRANT {connection.info.user} TO {role}".encode())
        try:
            dsn = make_conninfo(table.adopted.settings.dsn, user=role, password="x", passfile="")
            code, said = table.adopted.refuse("adopt", "drain", OUTBOX_DSN=dsn)
        finally:
            connection.execute(f"DROP ROLE {role}".encode())
    assert (code, f"ALTER ROLE {role} REPLICATION" in said) == (2, True), said
