"""`processed_mark`: one statement that makes a handler in any language idempotent."""

from __future__ import annotations

import subprocess
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest
from psycopg import IsolationLevel

from outbox_pipelines.consumer import migrate, prune
from tests.conftest import wait_until
from tests.consumer.place import DAY_MS, Place, running, uuid7
from tests.schema.servers import Connection, Database

MARK: Final = "SELECT processed_mark(%s, %s)"


@pytest.fixture
def database(empty: Database) -> Database:
    with empty.connect() as connection:
        migrate(connection)
    return empty


def mark(connection: Connection, event_id: uuid.UUID | str, source: str = "billing") -> bool:
    row = connection.execute(MARK, [event_id, source]).fetchone()
    assert row is not None
    assert isinstance(row[0], bool)
    return row[0]


@pytest.mark.parametrize("make", [uuid7, uuid.uuid4])
def test_an_event_is_new_once_for_each_source(database: Database, make: Any) -> None:
    event_id = make()
    with database.connect() as connection:
        found = [mark(connection, event_id, source) for source in ("billing", "billing", "shipping")]
        assert found == [True, False, True]
        assert mark(connection, str(event_id)) is False
        assert mark(connection, str(event_id).upper()) is False


def test_every_kind_of_argument_finds_its_function(database: Database) -> None:
    """Guards against a call that fails as ambiguous, or for the type that a driver sends."""
    event_id = uuid7()
    with database.connect() as connection:
        for written in ("'{}'", "'{}'::uuid", "'{}'::text", "'{}'::varchar"):
            query = f"SELECT processed_mark({written.format(event_id)}, 'billing'::varchar)"
            rows = connection.execute(query.encode()).fetchall()
            assert rows == [(written == "'{}'",)]
        named = "SELECT processed_mark(source => 'billing', event_id => %s)"
        assert connection.execute(named, [event_id]).fetchall() == [(False,)]


def test_the_mark_commits_and_rolls_back_with_the_work(database: Database) -> None:
    event_id = uuid7()
    with database.connect(autocommit=False) as connection:
        assert mark(connection, event_id)
        connection.rollback()
        assert mark(connection, event_id)
        connection.commit()
        assert not mark(connection, event_id)


@pytest.mark.parametrize("given", [(None, "billing"), ("7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b001", None)])
def test_null_is_an_error_and_not_false(database: Database, given: tuple[str | None, str | None]) -> None:
    """Guards against a handler that skips each event since it sends no id."""
    with database.connect() as connection, pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("SELECT processed_mark(%s::uuid, %s)", given)
    with database.connect() as connection, pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("SELECT processed_mark(%s::text, %s)", given)


@pytest.mark.parametrize("text", ["1", "", "order-events:1"])
def test_an_id_that_is_no_uuid_is_an_error(database: Database, text: str) -> None:
    """Guards against two producers' numbers that count as one event."""
    with database.connect() as connection, pytest.raises(psycopg.errors.InvalidTextRepresentation):
        mark(connection, text)


def waiting(database: Database, process: int) -> bool:
    query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    return bool(database.value(query, process))


@pytest.mark.parametrize("commits", [True, False])
def test_the_second_waits_for_the_first(database: Database, commits: bool) -> None:
    """Guards against an event that two processes handle, or that none does."""
    with (
        database.connect(autocommit=False) as first,
        database.connect(autocommit=False) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(20):
            event_id = uuid7()
            assert mark(first, event_id)
            answer: Future[bool] = pool.submit(mark, second, event_id)
            wait_until(lambda: waiting(database, second.info.backend_pid), what="the second to wait")
            assert not answer.done()
            first.commit() if commits else first.rollback()
            assert answer.result(600) is not commits
            second.commit()


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
@pytest.mark.parametrize("commits", [True, False])
def test_at_stricter_levels_the_whole_transaction_runs_again(
    database: Database, level: IsolationLevel, commits: bool
) -> None:
    """Guards against false for a mark that the transaction cannot see, and whose effects it cannot see."""
    event_id = uuid7()
    with (
        database.connect(autocommit=False) as first,
        database.connect(autocommit=False) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        second.isolation_level = level
        second.execute("SELECT count(*) FROM processed_events")
        assert mark(first, event_id)
        answer = pool.submit(mark, second, event_id)
        wait_until(lambda: waiting(database, second.info.backend_pid), what="the second to wait")
        first.commit() if commits else first.rollback()
        if not commits:
            assert answer.result(600)
            return
        with pytest.raises(psycopg.errors.SerializationFailure):
            answer.result(600)
        second.rollback()
        assert not mark(second, event_id)


def test_many_processes_and_many_duplicates(database: Database) -> None:
    """Each event is handled once, whichever of eight sessions is first."""
    events = [uuid7() for _ in range(100)]
    new: list[uuid.UUID] = []
    ready = threading.Barrier(8)

    def work(shift: int) -> None:
        with database.connect(autocommit=False) as connection:
            ready.wait()
            for at in range(len(events)):
                event_id = events[(at + shift) % len(events)]
                if mark(connection, event_id):
                    new.append(event_id)
                connection.commit()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(0, 80, 10)))
    assert sorted(new) == sorted(events)


def test_it_means_its_own_table_whatever_the_search_path(database: Database) -> None:
    """Guards against a mark in another table of this name, and against one that stands before it."""
    event_id = uuid7()
    with database.connect() as connection:
        connection.execute("CREATE SCHEMA other")
        connection.execute("CREATE TABLE other.processed_events (event_id uuid, source text, bucket int)")
        connection.execute("SET search_path = other")
        rows = connection.execute("SELECT public.processed_mark(%s, 'billing')", [event_id]).fetchall()
        assert rows == [(True,)]
        connection.execute("SET search_path = public")
        assert not mark(connection, event_id)


def test_the_privileges_of_the_table_decide(database: Database) -> None:
    """Guards against a role that marks events of others, and so hides them."""
    service = database.role()
    with database.connect(user=service) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            mark(connection, uuid7())
        database.rows(f"GRANT INSERT ON processed_events TO {service}")
        assert mark(connection, uuid7())


def test_it_forgets_as_the_consumer_does(database: Database) -> None:
    """A day is pruned as a whole; the mark of an event that was handled lately is kept."""
    old, late = (uuid7(uuid7().int // 2**80 - 20 * DAY_MS) for _ in range(2))
    new = uuid7()
    with database.connect() as connection:
        assert [mark(connection, each) for each in (old, new)] == [True, True]
        connection.execute("UPDATE processed_events SET processed_at = now() - interval '19 days'")
        connection.execute("UPDATE processed_events SET processed_at = now() WHERE event_id = %s", [new])
        assert len(prune(connection, timedelta(days=14)).emptied) == 1
        assert [mark(connection, each) for each in (old, new, late)] == [True, False, True]


def test_a_day_that_is_being_marked_is_not_pruned(database: Database) -> None:
    """Guards against a prune that waits for a handler, or that removes its mark."""
    event_id = uuid7(uuid7().int // 2**80 - 20 * DAY_MS)
    with database.connect() as owner, database.connect(autocommit=False) as handler:
        mark(owner, uuid7(event_id.int // 2**80))
        owner.execute("UPDATE processed_events SET processed_at = now() - interval '19 days'")
        assert mark(handler, event_id)
        assert len(prune(owner, timedelta(days=14)).busy) == 1
        handler.commit()
        assert not mark(owner, event_id)


def test_a_consumer_and_another_language_share_what_they_handled(place: Place) -> None:
    """In both directions: a service is rewritten, and events of its past come again."""
    theirs, ours = uuid7(), uuid7()
    with psycopg.connect(place.dsn) as connection:
        assert mark(connection, theirs)
    place.send(theirs, ours)
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = run.end()
    assert (counts.handled, counts.duplicates) == (1, 1)
    with psycopg.connect(place.dsn) as connection:
        assert not mark(connection, ours)


def test_psql_is_a_language_too(database: Database) -> None:
    psql = database.bin_dir / "psql"
    if not psql.exists():
        pytest.skip(f"no psql in {database.bin_dir}: the tests run with the machine's PostgreSQL")
    script = f"BEGIN; SELECT processed_mark('{uuid7()}', 'billing') AS new \\gset\n\\echo :new\nCOMMIT;"
    done = subprocess.run(
        [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", database.dsn],
        input=script,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "t\n"
    assert database.value("SELECT count(*) FROM processed_events") == 1
