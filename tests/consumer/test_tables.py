"""The table of what was handled: every id has its place, once, and old days go at once."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Consumer, Pruned, migrate, processed_events, prune
from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.core import scripts
from outbox_pipelines.errors import SetupError
from tests.consumer.place import DAY_MS, uuid7
from tests.schema.servers import Database

NOW = time.time_ns() // 1_000_000
FILES = sorted((Path(__file__).parents[2] / "sql" / "consumer").glob("*.sql"))
SIZE = "SELECT pg_relation_size('{}')"


def leaf(days_ago: int) -> str:
    return f"processed_events_{(NOW // DAY_MS - days_ago) % 64:02}"


def at(days_ago: int) -> uuid.UUID:
    return uuid7(NOW - days_ago * DAY_MS)


@pytest.fixture
def database(empty: Database) -> Database:
    with empty.connect() as connection:
        migrate(connection)
    return empty


def as_given(event_id: uuid.UUID, source: str) -> dict[str, object]:
    return {
        "id": event_id,
        "source": source,
        "bucket": processed_events.bucket(event_id),
        "topic": "orders",
        "key": "1",
        "block": False,
        "content": None,
    }


def recorded(connection: psycopg.Connection[Any], event_id: uuid.UUID, source: str) -> int:
    """As the consumer does it for a handler that does nothing: one, where the event is new."""
    with connection.transaction():
        count = connection.execute(queries.RECORD, as_given(event_id, source)).rowcount
        connection.execute(queries.END_HANDLING)
    return count


def record(
    database: Database, event_id: uuid.UUID, *, handled_days_ago: float = 0, source: str = "a"
) -> bool:
    """Whether the event is new; as the consumer does it, and then the clock goes on."""
    with database.connect() as connection:
        is_new = recorded(connection, event_id, source) == 1
        if is_new:
            connection.execute(
                "UPDATE processed_events SET processed_at = now() - %s WHERE event_id = %s",
                [timedelta(days=handled_days_ago), event_id],
            )
    return is_new


def pruned(database: Database, days: float) -> Pruned:
    with database.connect() as connection:
        return prune(connection, timedelta(days=days))


@pytest.mark.parametrize("days_ago", [0, 1, 63, 64, 20_000])
def test_an_id_of_version_7_lies_in_its_day(database: Database, days_ago: int) -> None:
    assert record(database, at(days_ago))
    assert database.value("SELECT tableoid::regclass::text FROM processed_events") == leaf(days_ago)


def test_no_id_lacks_a_place_and_none_has_two(database: Database) -> None:
    """Guards against an insert that fails because a partition is missing, or a duplicate in another one."""
    extremes = [uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1), uuid7(0), uuid7((1 << 48) - 1)]
    made = [uuid.uuid4(), uuid.uuid1(), uuid.uuid5(uuid.NAMESPACE_URL, "x"), *map(at, range(-70, 70))]
    with database.connect() as connection:
        for event_id in [*extremes, *made]:
            new = [recorded(connection, event_id, source) for source in ("a", "a", "b")]
            assert new == [1, 0, 1]
            row = connection.execute("SELECT processed_bucket(%s)", [event_id]).fetchone()
            assert row == (processed_events.bucket(event_id),)
    database.rows(
        "INSERT INTO processed_events (event_id, source, bucket) SELECT id, 'a', processed_bucket(id) "
        "FROM (SELECT md5(n::text)::uuid AS id FROM generate_series(1, 5000) n) ids"
    )


def test_pruning_empties_whole_days(database: Database) -> None:
    """Guards against rows deleted one by one, and against a duplicate within the days that are kept."""
    old, new = at(20), at(3)
    record(database, old, handled_days_ago=19)
    record(database, new, handled_days_ago=3)
    record(database, uuid.uuid4(), handled_days_ago=19)
    kept = uuid.uuid4()
    record(database, kept, handled_days_ago=3)
    assert pruned(database, 14) == Pruned((leaf(20),), (), 1, 0)
    assert database.value(SIZE.format(leaf(20))) == 0
    assert [record(database, each) for each in (old, new, kept)] == [True, False, False]
    assert pruned(database, 14) == Pruned((), (), 0, 0)


def test_an_old_event_handled_lately_is_kept(database: Database) -> None:
    """Guards against a dead letter that is replayed after weeks, delivered twice, and handled twice."""
    late, early = at(40), at(40)
    record(database, late, handled_days_ago=1)
    record(database, early, handled_days_ago=40)
    assert pruned(database, 14).emptied == ()
    assert not record(database, late)
    # And from the other side of the ring.
    record(database, at(-24), handled_days_ago=0)
    assert pruned(database, 1).emptied == ()


def test_pruning_does_not_wait_for_locks(database: Database) -> None:
    """Guards against a lock behind which all consumers queue, and against events recorded since the look."""
    straggler = at(20)
    record(database, at(20), handled_days_ago=19)
    record(database, at(21), handled_days_ago=19)
    with database.connect(autocommit=False) as consumer:
        consumer.execute("SELECT")
        recorded(consumer, straggler, "a")
        recorded(consumer, at(0), "a")
        assert pruned(database, 14) == Pruned((leaf(21),), (leaf(20),), 0, 0)
        consumer.commit()
    assert pruned(database, 14) == Pruned((), (), 0, 0)
    assert not record(database, straggler)


def test_an_event_recorded_between_look_and_lock_is_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a day emptied of what came a moment ago."""
    straggler = at(20)
    record(database, at(20), handled_days_ago=19)
    is_locked: list[Any] = []
    shown = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'AccessExclusiveLock'"
    with database.connect() as connection:
        looked = threading.Event()
        execute = connection.execute

        def between(query: Any, *given: Any, **named: Any) -> object:
            if query == queries.LOCK_TIMEOUT and not looked.is_set():
                looked.set()
                record(database, straggler)
            found = execute(query, *given, **named)
            if looked.is_set():
                is_locked.extend(execute(shown).fetchall())
            return found

        monkeypatch.setattr(connection, "execute", between)
        assert prune(connection, timedelta(days=14)).emptied == ()
        # The second look comes after the lock.
        assert is_locked[:2] == [(0,), (1,)]
    assert not record(database, straggler)


@pytest.mark.parametrize("days", [0, 0.5, 51])
def test_days_that_cannot_be_kept_are_refused(database: Database, days: float) -> None:
    with pytest.raises(SetupError, match="give 1 to 50 days"):
        pruned(database, days)


def test_migrating_again_changes_nothing(database: Database) -> None:
    catalog = database.catalog()
    with database.connect() as connection:
        migrate(connection)
    assert database.outbox("consumer", "migrate").output == "the consumer's tables exist\n"
    assert database.catalog() == catalog


def test_two_migrations_at_once(empty: Database) -> None:
    """Guards against two replicas of a service that start side by side."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with empty.connect() as connection:
                migrate(connection)
        except BaseException as error:  # noqa: BLE001 - asserted below
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert failures == []
    assert record(empty, at(0))


def test_psql_is_enough(empty: Database) -> None:
    psql = empty.bin_dir / "psql"
    if not psql.exists():
        pytest.skip(f"no psql in {empty.bin_dir}: the tests run with the machine's PostgreSQL")
    for file in 2 * FILES:
        subprocess.run([psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", file, empty.dsn], check=True)
    assert record(empty, at(0))


def test_they_are_no_tables_of_the_outbox(empty: Database) -> None:
    """Guards against consumers' tables in every outbox, and a check that calls them unknown."""
    assert not set(FILES) & set(scripts.files())
    assert "applied" in empty.outbox("migrate").output
    assert empty.value("SELECT to_regclass('processed_events')") is None
    assert empty.outbox("consumer", "migrate").exit_code == 0
    assert empty.outbox("migrate", "--check").output == "the schema is up to date\n"


def test_tables_of_another_version(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an error of SQL where a column is missing, and tables that an old consumer ruins."""
    consumer = Consumer(
        source="a", topics=["t"], kafka={"bootstrap.servers": "127.0.0.1:9"}, dsn=database.dsn
    )
    consumer.on_other(lambda event, connection: None)
    later = "INSERT INTO consumer_migrations (name, needs) VALUES ('0099_more', {})"
    for change, why in (
        (later.format("NULL"), None),
        (
            "UPDATE consumer_migrations SET needs = '1.2.0' WHERE name = '0099_more'",
            "and needs 1.2.0: install",
        ),
        (
            "DELETE FROM consumer_migrations WHERE name IN ('0004_processed_mark', '0099_more')",
            "it lacks 0004_processed_mark: run `outbox consumer migrate`",
        ),
    ):
        database.rows(change)
        shown = database.outbox("consumer", "status")
        if why is None:
            assert (consumer.backlog()[0].waiting, shown.exit_code) == (0, 0)
            assert "(0099_more), which runs with it: install the version that made it" in caplog.text
            continue
        with pytest.raises(SetupError, match=why):
            consumer.backlog()
        assert (shown.exit_code, shown.output.count("\n")) == (2, 1)
        assert why in shown.output


def test_the_command_prunes(database: Database) -> None:
    record(database, at(20), handled_days_ago=19)
    record(database, uuid.uuid4(), handled_days_ago=19)
    reported = database.outbox("consumer", "prune", "--keep-days", "14")
    assert (reported.exit_code, reported.output) == (
        0,
        "1 day emptied, 1 row without a day and 0 inbox rows deleted\n",
    )
    asked = database.outbox("consumer", "prune", "--keep-days", "14", "--json")
    assert asked.output == '{"emptied": [], "busy": [], "deleted": 0, "deleted_messages": 0}\n'


def test_the_outbox_is_not_taken_for_a_consumer(database: Database) -> None:
    """Guards against consumers' administration, and a prune, in the database of OUTBOX_DSN."""
    done = database.outbox("consumer", "migrate", OUTBOX_CONSUMER_DSN="", OUTBOX_DSN=database.dsn)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    assert "set OUTBOX_CONSUMER_DSN" in done.output


@pytest.mark.parametrize("name", ["processed_events", "inbox", "consumer_migrations"])
def test_a_table_of_the_applications_own_is_kept(empty: Database, name: str) -> None:
    """Guards against a consumer that takes a table of another shape for its own, or has none."""
    empty.rows(f"CREATE TABLE {name} (event_id uuid PRIMARY KEY)")
    with empty.connect() as connection:
        with pytest.raises(
            SetupError, match=f"table {name} that is not the consumer's: keep .*OUTBOX_CONSUMER_SCHEMA"
        ):
            migrate(connection)
        done = empty.outbox("consumer", "migrate")
        assert isinstance(done.exception, SystemExit)
        assert done.exit_code == 2
        connection.execute("CREATE SCHEMA outbox_consumer")
        connection.execute("SET search_path = outbox_consumer, public")
        for _ in range(2):
            migrate(connection)
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'outbox_consumer'::regnamespace "
            "AND relname IN ('processed_events', 'inbox', 'partition_owners') ORDER BY 1"
        ).fetchall()
        assert [each for (each,) in rows] == [
            "inbox",
            "partition_owners",
            "processed_events",
        ]
        rows = connection.execute("SELECT processed_mark(%s, 'a')", [at(0)]).fetchall()
        assert rows == [(True,)]
    assert empty.value(f"SELECT count(*) FROM public.{name}") == 0
