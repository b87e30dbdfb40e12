"""`outbox_grant_writer` gives an application what it needs, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from outbox_pipelines.writer import NewEvent, emit_many
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

REFUSED = psycopg.errors.InsufficientPrivilege


@pytest.fixture
def writer(shared: Database) -> Iterator[Connection]:
    """A transaction in which the role of an application acts that was granted nothing else."""
    role = shared.role()
    with shared.connect(autocommit=False) as connection:
        insert(connection)
        connection.execute("SELECT outbox_grant_writer(%s)", [role])
        connection.execute(f"SET LOCAL ROLE {role}".encode())
        yield connection
        connection.rollback()


def test_a_writer_inserts(writer: Connection) -> None:
    """Guards against a plain INSERT that fails without a right on the sequence, the id or the keys."""
    insert(writer)
    written = insert(writer, idempotency_key="k", headers="{}", version=1)
    with pytest.raises(psycopg.errors.UniqueViolation), writer.transaction():
        insert(writer, idempotency_key="k")
    assert one(writer, "SELECT count(*) FROM outbox WHERE id = %s", written.id) == (1,)


def test_a_writer_emits(writer: Connection) -> None:
    """Guards against missing rights: the function needs other rights than the INSERT, and different ones with
    a key."""
    one(writer, "SELECT outbox_emit('order', '1', 'e', '{}')")
    call = "SELECT duplicate FROM outbox_emit('order', '1', 'e', '{}', idempotency_key => 'k')"
    assert [one(writer, call), one(writer, call)] == [(False,), (True,)]
    many = (
        "SELECT duplicate FROM outbox_emit_many(jsonb_build_array(jsonb_build_object('aggregate_type', 'o', "
        "'aggregate_id', 1, 'event_type', 'e', 'payload', 1, 'idempotency_key', 'k2')))"
    )
    assert [one(writer, many), one(writer, many)] == [(False,), (True,)]
    assert len(emit_many(writer, [NewEvent("order", n, "e", {}) for n in range(2)])) == 2
    keyed = [NewEvent("order", n, "e", {}, idempotency_key=f"k{n}") for n in (2, 3)]
    assert [emitted.duplicate for emitted in emit_many(writer, keyed)] == [True, False]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outbox SET payload = '1'",
        "DELETE FROM outbox",
        "TRUNCATE outbox",
        "INSERT INTO outbox (seq) VALUES (1)",
        "INSERT INTO outbox (tx) VALUES ('1')",
        "INSERT INTO outbox (created_at) VALUES (now())",
        "SELECT payload FROM outbox",
        "SELECT * FROM outbox_events",
        "SELECT * FROM outbox_parked",
        "SELECT nextval('outbox_seq'), setval('outbox_seq', 1)",
        "UPDATE outbox_keys SET event_id = event_id",
        "DELETE FROM outbox_keys",
        "UPDATE outbox_shards SET done = done",
        "SELECT outbox_ensure_partitions(100)",
    ],
)
def test_a_writer_can_do_no_more(writer: Connection, statement: str) -> None:
    """Guards against an application that reads events of others, or disturbs order, positions and keys."""
    with pytest.raises(REFUSED):
        writer.execute(statement.encode())


def test_a_writer_cannot_reach_a_day_directly(writer: Connection) -> None:
    """Guards against rights that the partitions have and the table does not."""
    [day] = one(writer, "SELECT 'outbox_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    with pytest.raises(REFUSED):
        insert(writer, day)


def test_functions_are_granted_where_public_has_none(shared: Database) -> None:
    """Guards against missing grants in a hardened database, in which PUBLIC may not call functions."""
    role = shared.role()
    with shared.connect(autocommit=False) as connection:
        connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
        connection.execute("SELECT outbox_grant_writer(%s)", [role])
        connection.execute(f"SET LOCAL ROLE {role}".encode())
        insert(connection, idempotency_key="k1")
        one(connection, "SELECT outbox_emit('order', '1', 'e', '{}', idempotency_key => 'k2')")
        connection.execute("SELECT outbox_emit_many('[]')")
        emit_many(connection, [NewEvent("order", n, "e", {}) for n in range(2)])
        emit_many(connection, [NewEvent("order", n, "e", {}, idempotency_key=f"k{n}") for n in (3, 4)])
        connection.rollback()


def test_a_role_that_needs_quoting(connection: Connection) -> None:
    """Guards against a grant that is built from an unquoted name."""
    connection.execute('CREATE ROLE "App Writer"')
    connection.execute("""SELECT outbox_grant_writer('"App Writer"')""")
    connection.execute('SET LOCAL ROLE "App Writer"')
    insert(connection)
