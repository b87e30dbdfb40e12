"""A client cannot write its own seq, tx or created_at: the relay finds events by them."""

from __future__ import annotations

import io

import psycopg
import pytest

from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

# A fresh session has drawn no number that a client's own one could be compared with; refused all the same.
REFUSED = (psycopg.errors.CheckViolation, psycopg.errors.ObjectNotInPrerequisiteState)
COPY = "COPY outbox (aggregate_type, aggregate_id, event_type, payload, {}) FROM STDIN"
YESTERDAY = "SELECT transaction_timestamp() - interval '1 day'"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seq", 1),
        ("seq", 2**62),
        ("tx", "1"),
        ("tx", "99999999"),
        ("created_at", "2001-01-01 00:00:00+00"),
        ("created_at", "2101-01-01 00:00:00+00"),
        ("created_at", "infinity"),
    ],
)
def test_own_values_are_refused(connection: Connection, column: str, value: object) -> None:
    """Guards against an event that no tick reads, or whose order differs from that of its transaction."""
    with pytest.raises(REFUSED), connection.transaction():
        insert(connection, **{column: value})
    # Beyond 1, which in a new database could be the number just drawn.
    insert(connection)
    insert(connection)
    # Today's partition takes it, so that only the guard can refuse.
    clock = one(connection, "SELECT date_trunc('day', now(), 'UTC') + interval '1 millisecond'")[0]
    given = clock if column == "created_at" else value
    with pytest.raises(psycopg.errors.CheckViolation, match="outbox: ") as refused:
        insert(connection, **{column: given})
    assert (refused.value.diag.message_hint or "").startswith("Leave ")


def test_own_values_are_refused_in_any_row(connection: Connection) -> None:
    """Guards against a guard that looks at the first row of a statement only."""
    with pytest.raises(psycopg.errors.CheckViolation, match="seq and tx are drawn by the database"):
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, seq) "
            "SELECT 'order', '1', 'e', '{}', CASE i WHEN 3 THEN 5 ELSE nextval('outbox_seq') END "
            "FROM generate_series(1, 3) i"
        )


@pytest.mark.parametrize("column", ["seq", "tx", "created_at"])
def test_own_values_are_refused_in_copy(connection: Connection, column: str) -> None:
    """Guards against COPY, which skips rules and takes every column it is given."""
    insert(connection)
    insert(connection)
    value = one(connection, YESTERDAY)[0] if column == "created_at" else 1
    with (
        pytest.raises(psycopg.errors.CheckViolation, match="outbox: "),
        connection.cursor().copy(COPY.format(column)) as copy,
    ):
        copy.write_row(["order", "1", "e", "{}", value])


def test_many_rows_and_copy_pass_without_them(connection: Connection) -> None:
    """Guards against a guard that compares with the last number drawn and so refuses honest batches."""
    first = insert(connection).seq
    connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "SELECT 'order', i::text, 'e', '{}' FROM generate_series(1, 500) i ORDER BY random()"
    )
    connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
        "VALUES ('order', '1', 'e', '{}'), ('order', '2', 'e', '{}'), ('order', '3', 'e', '{}')"
    )
    rows = io.StringIO("".join(f"order\t{n}\te\t{{}}\n" for n in range(500)))
    with connection.cursor().copy(COPY.format("version").replace(", version", "")) as copy:
        copy.write(rows.read())
    assert one(connection, "SELECT count(*), max(seq) - min(seq) FROM outbox") == (1004, 1003)
    assert one(connection, "SELECT min(seq) FROM outbox") == (first,)


def test_explicit_defaults_pass(connection: Connection) -> None:
    """Guards against an error for an ORM that writes DEFAULT or now() for every column it knows."""
    connection.execute(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, seq, tx, created_at) "
        "VALUES ('order', '1', 'e', '{}', DEFAULT, DEFAULT, now())"
    )


def test_the_owner_may_declare_a_backfill_of_the_past(connection: Connection) -> None:
    """Guards against history that cannot be imported, or an import that writes into the future."""
    connection.execute("SET LOCAL outbox.backfill = on")
    [yesterday] = one(connection, YESTERDAY)
    [tomorrow] = one(connection, "SELECT transaction_timestamp() + interval '1 day'")
    insert(connection, created_at=yesterday)
    with pytest.raises(psycopg.errors.CheckViolation, match="created_at is the time of the transaction"):
        insert(connection, created_at=tomorrow)


@pytest.mark.parametrize("column", ["seq", "tx"])
def test_a_backfill_does_not_bring_its_own_order(connection: Connection, column: str) -> None:
    """Guards against lost imported rows, whose old transaction ids every position covers already."""
    connection.execute("SET LOCAL outbox.backfill = on")
    # Beyond 1, which in a new database could be the number just drawn.
    insert(connection)
    insert(connection)
    with pytest.raises(psycopg.errors.CheckViolation, match="seq and tx are drawn by the database"):
        insert(connection, created_at=one(connection, YESTERDAY)[0], **{column: "1"})


def test_only_the_owner_may_declare_a_backfill(database: Database) -> None:
    """Guards against a setting that any client can set as the only guard."""
    writer = database.role()
    database.rows(f"GRANT INSERT, SELECT ON outbox TO {writer}")
    database.rows(f"GRANT USAGE ON SEQUENCE outbox_seq TO {writer}")
    with database.connect(user=writer, autocommit=False) as connection:
        connection.execute("SET outbox.backfill = on")
        insert(connection)
        with pytest.raises(psycopg.errors.CheckViolation, match="created_at is the time of the transaction"):
            insert(connection, created_at=one(connection, YESTERDAY)[0])
        connection.rollback()
