"""`outbox_ensure_partitions` makes the coming days, and no writer waits for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from outbox_pipelines.database import schema
from tests.conftest import wait_until
from tests.schema.events import insert, one
from tests.schema.servers import Connection, Database

DAYS = "SELECT day FROM outbox_days ORDER BY day"
EXPECTED = "SELECT (now() AT TIME ZONE 'UTC')::date + n FROM generate_series(-1, %s) n ORDER BY n"
BOUNDS = """
SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE relispartition AND relkind = 'r' ORDER BY relname"""
AT_THE_DOOR = """
SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()"""
ENSURE = "SELECT outbox_ensure_partitions(%s)"


def bounds(connection: Connection) -> list[tuple[str]]:
    """Midnight to midnight UTC, for each day."""
    days = connection.execute("SELECT day, day + 1 FROM outbox_days ORDER BY day").fetchall()
    return [(f"FOR VALUES FROM ('{day} 00:00:00+00') TO ('{after} 00:00:00+00')",) for day, after in days]


def test_a_fresh_schema_has_yesterday_to_two_weeks_ahead(connection: Connection) -> None:
    """Guards against a first insert that finds no partition: of a transaction from before midnight, or in two
    weeks."""
    assert connection.execute(DAYS).fetchall() == connection.execute(EXPECTED, [14]).fetchall()
    connection.execute("SET LOCAL TimeZone = 'UTC'")
    assert connection.execute(BOUNDS).fetchall() == bounds(connection)


def test_it_makes_what_is_missing_and_nothing_twice(connection: Connection) -> None:
    """Guards against a second call that fails on the tables of the first."""
    assert one(connection, ENSURE, 14) == (0,)
    assert one(connection, ENSURE, 17) == (3,)
    assert one(connection, ENSURE, 17) == (0,)
    assert connection.execute(DAYS).fetchall() == connection.execute(EXPECTED, [17]).fetchall()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("TimeZone", "Pacific/Kiritimati"),
        ("TimeZone", "Etc/GMT+12"),
        ("DateStyle", "German"),
        ("DateStyle", "SQL, DMY"),
        ("DateStyle", "Postgres, MDY"),
    ],
)
def test_days_are_utc_whatever_the_session_speaks(connection: Connection, setting: str, value: str) -> None:
    """Guards against days of the operator's time zone, or 5 March taken for 3 May."""
    connection.execute("SELECT set_config(%s, %s, true)", [setting, value])
    assert one(connection, ENSURE, 20) == (6,)
    connection.execute("SET LOCAL TimeZone = 'UTC'; SET LOCAL DateStyle = 'ISO'")
    assert connection.execute(DAYS).fetchall() == connection.execute(EXPECTED, [20]).fetchall()
    assert connection.execute(BOUNDS).fetchall() == bounds(connection)


def test_a_day_that_was_dropped_is_not_made_again(connection: Connection) -> None:
    """Guards against an empty partition for a day of the archive, which retention would then compare with its
    file."""
    for state in ("closed", "archived", "dropped"):
        [day] = one(
            connection,
            "UPDATE outbox_days SET state = %s "
            "WHERE day = (SELECT min(day) FROM outbox_days WHERE state = 'open') "
            "RETURNING to_char(day, 'YYYYMMDD')",
            state,
        )
        connection.execute(f"DROP TABLE outbox_{day}".encode())
    assert one(connection, ENSURE, 14) == (0,)
    assert one(connection, "SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox'::regclass") == (13,)


def test_a_partition_that_was_renamed_keeps_no_other_day_away(connection: Connection) -> None:
    """Guards against days that are not made because one cannot be."""
    (tomorrow,) = one(connection, "SELECT to_char((now() AT TIME ZONE 'UTC')::date + 1, 'YYYYMMDD')")
    connection.execute(f"ALTER TABLE outbox_{tomorrow} RENAME TO kept".encode())
    assert one(connection, ENSURE, 17) == (3,)


def test_an_open_day_that_is_over_is_not_made_again(connection: Connection) -> None:
    """Guards against an empty partition in place of the events that someone has dropped with it."""
    leaves = connection.execute(
        "SELECT 'outbox_' || to_char(day, 'YYYYMMDD') FROM outbox_days ORDER BY day LIMIT 3"
    ).fetchall()
    for (leaf,) in leaves:
        connection.execute(f"DROP TABLE {leaf}".encode())
    assert one(connection, ENSURE, 14) == (2,)
    made = [one(connection, "SELECT to_regclass(%s) IS NOT NULL", leaf) for (leaf,) in leaves]
    assert made == [(False,), (True,), (True,)]


def test_a_day_that_is_made_again_is_not_sealed(connection: Connection) -> None:
    """Guards against a day that is closed without a seal, because its first partition had one."""
    connection.execute("SET LOCAL TimeZone = 'UTC'")
    connection.execute("UPDATE outbox_days SET sealed_at = now() WHERE day = current_date")
    [leaf] = one(connection, "SELECT 'outbox_' || to_char(current_date, 'YYYYMMDD')")
    connection.execute(f"DROP TABLE {leaf}".encode())
    assert one(connection, ENSURE, 14) == (1,)
    assert one(connection, "SELECT count(*) FROM outbox_days WHERE sealed_at IS NOT NULL") == (0,)
    insert(connection)


def test_days_belong_to_the_owner_of_the_table(database: Database) -> None:
    """Guards against days that a superuser made, and that the owner then cannot drop."""
    owner = database.role()
    database.rows(f"GRANT CREATE, USAGE ON SCHEMA public TO {owner}")
    database.rows(f"ALTER TABLE outbox OWNER TO {owner}")
    database.rows(ENSURE, 15)
    assert (
        database.value(
            "SELECT relowner::regrole::text FROM pg_class WHERE relname = "
            "(SELECT 'outbox_' || to_char(max(day), 'YYYYMMDD') FROM outbox_days)"
        )
        == owner
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_two_at_once_make_each_day_once(database: Database, lost: int) -> None:
    """Guards against two schedulers, or a command next to one, of which one fails on a table that exists."""
    if lost:
        [tomorrow] = database.rows("SELECT to_char(now() AT TIME ZONE 'UTC' + interval '1 day', 'YYYYMMDD')")
        database.rows(f"DROP TABLE outbox_{tomorrow[0]}")
    with (
        database.connect(autocommit=False) as gate,
        database.connect() as first,
        database.connect() as second,
    ):
        # Both are stopped by a lock, so that they really meet.
        assert one(gate, ENSURE, 14) == (lost,)
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(one, connection, ENSURE, 17) for connection in (first, second)]
            wait_until(lambda: database.value(AT_THE_DOOR) == 2, what="two at the door")
            gate.rollback()
            assert sorted(answer.result(600) for answer in answers) == [(0,), (3 + lost,)]
    assert database.rows(DAYS) == database.rows(EXPECTED, 17)
    assert database.value("SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox'::regclass") == 19


def test_writers_do_not_wait_for_it(database: Database) -> None:
    """Guards against a lock on the table that inserts wait for: all business transactions would stop.

    Locks are held until the end of the transaction, so an insert at its end meets every lock it ever took.
    """
    with database.connect(autocommit=False) as maintenance, database.connect(autocommit=False) as writer:
        assert one(maintenance, ENSURE, 17) == (3,)
        writer.execute("SET lock_timeout = '50ms'")
        insert(writer)
        one(writer, "SELECT outbox_emit('order', '1', 'e', '{}', idempotency_key => 'k')")
        writer.commit()
        maintenance.commit()


def test_it_does_not_wait_for_writers(database: Database) -> None:
    """Guards against maintenance that waits for a long transaction, and a queue of inserts behind it."""
    with database.connect(autocommit=False) as writer, database.connect() as maintenance:
        insert(writer)
        assert one(maintenance, ENSURE, 17) == (3,)
        insert(writer)
        writer.commit()


def test_a_schema_that_needs_quoting(empty: Database) -> None:
    """Guards against a lock or a table name that is built from an unquoted schema."""
    there = replace(empty, schema="My Outbox")
    schema.migrate(there.settings)
    assert empty.value('SELECT "My Outbox".outbox_ensure_partitions(15)') == 1
