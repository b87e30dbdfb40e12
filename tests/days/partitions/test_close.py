"""Closing: a day that is over never changes again, and waits for everybody who may still write into it."""

from __future__ import annotations

import threading
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.partitions import ahead, calendar, close, partitions_sql
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.local import postgres
from tests.conftest import wait_until
from tests.days.partitions import days
from tests.days.partitions.days import DAY, TODAY
from tests.schema.servers import Connection, Database, fresh

LEAF = calendar.leaf_of(DAY)
_NAMES = "aggregate_type, aggregate_id, event_type, payload, created_at"


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals at once: what is waited for stays."""
    monkeypatch.setattr(close, "_TRIES", 2)
    monkeypatch.setattr(close, "_HIDDEN_SECONDS", 0.5)


def _why_not(database: Database) -> str:
    (closing,) = close.close(database.settings, DAY)
    assert not closing.closed
    assert days.state(database) == "open"
    return closing.why_not


def test_a_day_that_is_over_and_published_closes(database: Database) -> None:
    """Guards against days that stay open, which the relay reads without end."""
    days.fill(database)
    days.relayed(database)
    shown = database.outbox("partitions", "close", OUTBOX_CLOSE_AFTER_MINUTES="0")
    assert shown.exit_code == 0
    assert f"{DAY}  closed" in shown.output
    assert days.state(database) == "closed"
    assert database.value("SELECT closed_at > sealed_at FROM outbox_days WHERE day = %s", DAY)
    assert database.value("SELECT outbox_open_from()") == TODAY


def test_today_stays_open(database: Database) -> None:
    """Guards against a day that closes while writers need it: every business transaction would fail."""
    shown = database.outbox("partitions", "close", str(TODAY))
    assert shown.exit_code == 1
    assert "ends at midnight" in shown.output
    at_once = database.settings.model_copy(update={"close_after_minutes": 0.0})
    ahead.ensure(database.settings, since=DAY)
    past = [DAY + timedelta(n) for n in range((TODAY - DAY).days)]
    assert [each.day for each in close.close(at_once)] == past


def test_a_day_that_has_just_ended_waits(database: Database) -> None:
    """Guards against a clock that steps back over midnight right after its day was closed."""
    minutes = (datetime.now(UTC) - datetime.combine(TODAY, datetime.min.time(), UTC)).total_seconds() / 60
    settings = database.settings.model_copy(update={"close_after_minutes": minutes + 5})
    assert close.close(settings) == []
    assert len(close.close(settings.model_copy(update={"close_after_minutes": minutes - 0.1}))) == 1


def test_a_late_insert_is_refused(database: Database) -> None:
    """Guards against an event that lands in an archived day and is lost with it."""
    days.closed(database)
    before = database.value(f"SELECT count(*) FROM {LEAF}")
    for role in ("origin", "replica"):
        with database.connect(autocommit=False) as connection:
            connection.execute(f"SET LOCAL session_replication_role = {role}".encode())
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="closed"):
                days.write(connection)
            connection.rollback()
            connection.execute("SET LOCAL outbox.backfill = on")
            connection.execute(f"SET LOCAL session_replication_role = {role}".encode())
            # Into the partition itself, with a seq and a tx that the database draws.
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"{LEAF} is closed"):
                connection.execute(
                    f"INSERT INTO {LEAF} ({_NAMES}) SELECT {_NAMES} FROM {LEAF} LIMIT 1".encode()
                )
            connection.rollback()
    with database.connect(autocommit=False) as connection:
        connection.execute("SET LOCAL outbox.backfill = on")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"{LEAF} is closed"):
            _copy(connection)
    assert database.value(f"SELECT count(*) FROM {LEAF}") == before


def _copy(connection: Connection) -> None:
    with connection.cursor() as cursor, cursor.copy(f"COPY {LEAF} ({_NAMES}) FROM STDIN".encode()) as copy:
        copy.write_row(["order", "1", "order.placed", "{}", f"{DAY} 12:00:00+00"])


def test_a_transaction_that_began_before_midnight_is_waited_for(database: Database) -> None:
    """Guards against the refusal of an insert by a transaction that began in time."""
    yesterday = TODAY - timedelta(1)
    days.relayed(database)
    elsewhere = psycopg.connect(psycopg.conninfo.make_conninfo(database.dsn, dbname="postgres"))
    with elsewhere, database.connect(autocommit=False) as old:
        elsewhere.execute("SELECT 1")
        ((pid,),) = old.execute("SELECT pg_backend_pid()")
        # What is old is determined by the day's end: it began before the end of today.
        tomorrow = database.settings.model_copy(update={"close_after_minutes": 0.0})
        with database.connect() as connection, database.connect(autocommit=False) as younger:
            younger.execute("SELECT 1")
            found = close.still_running(connection, TODAY)
        # The oldest one, and none of another database.
        assert f"pid {pid}" in found
        assert "pg_terminate_backend" in found
        (closing,) = close.close(tomorrow, yesterday)
        assert closing.closed


def test_an_old_transaction_holds_the_day_open(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a look at running transactions whose result is ignored."""
    days.fill(database)
    days.relayed(database)
    # The one below then began before the day's end.
    monkeypatch.setattr(partitions_sql, "RUNNING", partitions_sql.RUNNING.replace("::date + 1", "::date + 9"))
    # Of the server, or of a role: the message says UTC.
    database.rows(
        "DO $$ BEGIN EXECUTE format("
        "'ALTER DATABASE %I SET TimeZone = %L', current_database(), 'Asia/Tokyo'); END $$"
    )
    with database.connect(autocommit=False) as old:
        ((since,),) = old.execute(
            "SELECT to_char(xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') "
            "FROM pg_stat_activity WHERE pid = pg_backend_pid()"
        )
        assert f"runs since {since} UTC and can still write into it" in _why_not(database)
        old.rollback()
    assert close.close(database.settings, DAY)[0].closed


def test_a_transaction_whose_age_is_hidden_is_waited_for(database: Database) -> None:
    """Guards against an owner that may not see when others began, and takes that for no transactions."""
    owner, app = database.role(), database.role()
    database.rows(f"ALTER SCHEMA public OWNER TO {owner}")
    days.fill(database)
    days.relayed(database)
    with database.connect(user=app, autocommit=False) as old, database.connect(user=owner) as connection:
        old.execute("SELECT 1")
        ((pid,),) = old.execute("SELECT pg_backend_pid()")
        found = close.still_running(connection, DAY)
        assert f"pid {pid}" in found
        assert "pg_read_all_stats" in found
        old.rollback()
        assert close.still_running(connection, DAY) == ""


def test_a_transaction_with_rows_in_the_day_holds_it_open(database: Database) -> None:
    """Guards against trust in what sessions say: the partition's lock is the proof."""
    days.fill(database)
    days.relayed(database)
    with database.connect(autocommit=False) as late:
        days.write(late)
        ((pid,),) = late.execute("SELECT pg_backend_pid()")
        assert f"locked by pid {pid}" in _why_not(database)
        late.commit()
    assert "has not published 20" in _why_not(database)
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed


def test_a_prepared_transaction_holds_it_open(database: Database) -> None:
    """Guards against a prepared transaction, which no list of sessions shows."""
    if database.value("SHOW max_prepared_transactions") == "0":
        pytest.skip("this server has no prepared transactions")
    days.fill(database)
    days.relayed(database)
    with database.connect(autocommit=False) as connection:
        days.write(connection)
        connection.execute("PREPARE TRANSACTION 'transfer'")
    why_not = close.close(database.settings, DAY)[0].why_not
    with database.connect() as connection:
        connection.execute("COMMIT PREPARED 'transfer'")
    assert "ROLLBACK PREPARED 'transfer'" in why_not
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed


@pytest.mark.parametrize("is_prepared", [False, True], ids=["a session", "a prepared transaction"])
def test_a_commit_behind_the_position_holds_it_open(database: Database, is_prepared: bool) -> None:
    """Guards against a look only at rows behind the end of the positions: what was running when the relay
    read has a lower id, is not published, and would be dropped with the day."""
    days.fill(database)
    with database.connect(autocommit=False) as late:
        days.write(late, events=3)
        # The position's end lies behind the transaction that is still running.
        days.write_elsewhere(database)
        days.relayed(database)
        if is_prepared:
            late.execute("PREPARE TRANSACTION 'late'")
            late.rollback()
            database.rows("COMMIT PREPARED 'late'")
        else:
            late.commit()
    assert "has not published 3 of" in _why_not(database)
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed


def test_a_shard_that_lags_holds_it_open(database: Database) -> None:
    """Guards against a day that closes while a part of it is not published: it would never be read again."""
    days.fill(database)
    days.relayed(database)
    database.rows(
        "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
        "SELECT 1, 2, '3:3:', system_identifier, database FROM outbox_shards"
    )
    database.rows("UPDATE outbox_shards SET shards = 2")
    assert "shard 1 has not published" in _why_not(database)
    # A shard that has nothing in the day does not hold it open, however far behind it is.
    database.rows("UPDATE outbox_shards SET done = '3:3:' WHERE shard = 0")
    database.rows("UPDATE outbox_shards SET done = pg_current_snapshot() WHERE shard = 1")
    assert "shard 0 has not published" in _why_not(database)
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed


def test_a_shard_without_events_in_the_day_does_not_hold_it_open(database: Database) -> None:
    """Guards against a day that waits for the position of each shard, also where another one has its rows."""
    days.fill(database, events=1)
    days.relayed(database)
    database.rows(
        "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
        "SELECT 1, 2, '3:3:', system_identifier, database FROM outbox_shards"
    )
    database.rows("UPDATE outbox_shards SET shards = 2")
    its = database.value(f"SELECT outbox_shard_of(aggregate_type, aggregate_id, 2) FROM {LEAF}")
    database.rows("UPDATE outbox_shards SET done = '3:3:' WHERE shard <> %s", its)
    database.rows("UPDATE outbox_shards SET done = pg_current_snapshot() WHERE shard = %s", its)
    assert close.close(database.settings, DAY)[0].closed


def test_a_tick_that_is_not_finished_counts_as_far_as_it_is(database: Database) -> None:
    """Guards against a position that is taken for its end."""
    days.fill(database)
    seqs = [seq for (seq,) in database.rows(f"SELECT seq FROM {LEAF} ORDER BY seq")]
    now = database.value("SELECT pg_current_snapshot()::text")
    behind = Snapshot(3, 3, ())
    database.rows(
        "UPDATE outbox_shards SET done = %s, target = %s, last_seq = %s", str(behind), now, seqs[-2]
    )
    assert "has not published 1 of" in _why_not(database)
    database.rows("UPDATE outbox_shards SET last_seq = %s", seqs[-1])
    assert close.close(database.settings, DAY)[0].closed


def test_parked_events_hold_it_open_and_dead_letters_do_not(database: Database) -> None:
    """Guards against an archive in which the fate of an event is still open."""
    days.fill(database)
    days.relayed(database)
    database.rows(f"INSERT INTO outbox_parked SELECT *, 'waiting' FROM {LEAF} LIMIT 2")
    for state in ("waiting", "retrying", "replaying"):
        database.rows("UPDATE outbox_parked SET state = %s", state)
        assert "parked, and to be tried again: 2 events of it" in _why_not(database)
    database.rows("UPDATE outbox_parked SET state = 'failed'")
    assert close.close(database.settings, DAY)[0].closed


def test_parked_events_of_other_days_do_not_hold_it_open(database: Database) -> None:
    """Guards against days that close only when no event of any day is parked."""
    days.fill(database)
    days.relayed(database)
    database.rows(f"INSERT INTO outbox_parked SELECT *, 'waiting' FROM {LEAF} LIMIT 2")
    for moment in (f"{DAY} 00:00:00+00'::timestamptz - interval '1 us", f"{DAY + timedelta(1)} 00:00:00+00"):
        database.rows(f"UPDATE outbox_parked SET created_at = '{moment}'")
        assert close.close(database.settings, DAY)[0].closed
        close.reopen(database.settings, DAY)
        days.relayed(database)
    database.rows(f"UPDATE outbox_parked SET created_at = '{DAY} 00:00:00+00'")
    assert "parked, and to be tried again: 2 events of it" in _why_not(database)


def test_a_closed_day_is_not_closed_again(database: Database) -> None:
    """Guards against work on each day that was ever closed, and a later moment of closing."""
    days.closed(database)
    before = database.rows("SELECT closed_at, published FROM outbox_days WHERE day = %s", DAY)
    assert DAY not in [closing.day for closing in close.close(database.settings)]
    assert close.close(database.settings, DAY) == [close.Closing(DAY, True)]
    assert database.rows("SELECT closed_at, published FROM outbox_days WHERE day = %s", DAY) == before


def test_a_day_that_another_one_archives_meanwhile_stays_archived(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a slow closer that undoes what was done with the day since it looked."""
    days.fill(database)
    days.relayed(database)
    settings = days.archiving(database, tmp_path)
    look = close._unpublished

    def look_slowly(connection: Connection, day: date) -> str:
        monkeypatch.setattr(close, "_unpublished", look)
        assert close.close(settings, day)[0].closed
        archive.archive(settings, day)
        return look(connection, day)

    monkeypatch.setattr(close, "_unpublished", look_slowly)
    close.close(settings, DAY)
    assert days.state(database) == "archived"


def test_the_last_seq_of_a_day_is_its_own(database: Database) -> None:
    """Guards against a day that remembers the sequence of others, which a restored database compares with."""
    days.fill(database, DAY - timedelta(1), 1)
    days.fill(database)
    # At the moment in which it begins, and in which the next one does.
    ahead.ensure(database.settings, since=DAY)
    for day in (DAY, DAY + timedelta(1)):
        with database.connect(autocommit=False) as connection:
            connection.execute("SET LOCAL outbox.backfill = on")
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
                "VALUES ('order', '1', 'order.placed', '{}', %s::date::timestamp AT TIME ZONE 'UTC')",
                [day],
            )
    last = database.value(f"SELECT max(seq) FROM {LEAF}")
    for other in (DAY - timedelta(1), DAY + timedelta(1)):
        days.fill(database, other, 1)
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed
    assert database.value("SELECT last_seq FROM outbox_days WHERE day = %s", DAY) == last


def test_a_lock_in_another_database_is_not_named(
    server: postgres.Postgres, template: str, database: Database
) -> None:
    """Guards against an operator who ends the session of another outbox: its tables have the same numbers."""
    leaf = calendar.leaf_of(TODAY)
    number = f"SELECT '{leaf}'::regclass::oid"
    with fresh(server, template) as other, other.connect(autocommit=False) as locking:
        locking.execute(f"LOCK TABLE {leaf} IN SHARE MODE".encode())
        assert other.value(number) == database.value(number)
        with database.connect() as connection:
            assert connection.execute(partitions_sql.HOLDERS, {"leaf": leaf}).fetchall() == []


def test_who_holds_it_open_is_named(database: Database) -> None:
    """Guards against an operator who ends the wrong session, or the wrong prepared transaction."""
    if database.value("SHOW max_prepared_transactions") == "0":
        pytest.skip("this server has no prepared transactions")
    other = DAY + timedelta(1)
    days.fill(database)
    days.fill(database, other)
    days.relayed(database)
    for name, day in (("another", other), ("this", DAY)):
        with database.connect(autocommit=False) as connection:
            days.write(connection, day)
            connection.execute(f"PREPARE TRANSACTION '{name}'".encode())
    try:
        assert _why_not(database).endswith("ROLLBACK PREPARED 'this'")
    finally:
        database.rows("ROLLBACK PREPARED 'this'")
        database.rows("ROLLBACK PREPARED 'another'")
    with database.connect(autocommit=False) as late, database.connect(autocommit=False) as elsewhere:
        days.write(late)
        days.write(elsewhere, other)
        ((pid,),) = late.execute("SELECT pg_backend_pid()")
        locking = f"DO $$ BEGIN LOCK TABLE {LEAF} IN SHARE MODE; END $$"
        waiting = threading.Thread(target=database.rows, args=(locking,))
        waiting.start()
        wait_until(lambda: database.value("SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        assert f"locked by pid {pid}, which" in _why_not(database)
        late.rollback()
        waiting.join()
        elsewhere.rollback()
    assert close.close(database.settings, DAY)[0].closed


def test_sealing_makes_writers_wait_50_ms_at_most(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against G7: a lock that is asked for keeps everybody waiting behind it."""
    monkeypatch.setattr(close, "_TRIES", 3)
    monkeypatch.setattr(close, "_PAUSE_SECONDS", 1.0)
    days.fill(database)
    days.relayed(database)
    waits: list[float] = []
    with database.connect(autocommit=False) as late, database.connect(autocommit=False) as other:
        days.write(late, events=1)
        closer = threading.Thread(target=close.close, args=(database.settings, DAY))
        closer.start()
        while closer.is_alive():
            began = time.monotonic()
            days.write(other, events=1)
            waits.append(time.monotonic() - began)
            other.rollback()
        closer.join()
    assert len(waits) > 20
    # 50 ms, and what a busy machine adds; it is 3 s where the lock is waited for.
    assert max(waits) < 2.5


def test_a_clock_that_is_ahead_closes_nothing(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against today being closed because the database's clock has jumped to tomorrow."""
    ahead_of_us = "SELECT clock_timestamp() + interval '1 day'"
    monkeypatch.setattr(partitions_sql, "CLOCK", ahead_of_us)
    with pytest.raises(UnavailableError, match="differ by 1440 minutes"):
        close.close(database.settings)


def test_a_day_closed_by_a_wrong_clock_is_opened_again(database: Database) -> None:
    """Guards against an outage for the rest of the day, after the clock was put right."""
    days.closed(database)
    epoch = database.value("SELECT epoch FROM outbox_shards")
    shown = database.outbox("partitions", "reopen", str(DAY), "--yes")
    assert shown.exit_code == 0
    assert days.state(database) == "open"
    # Relays have stopped looking at the day: they must start over.
    assert database.value("SELECT epoch FROM outbox_shards") == epoch + 1
    with database.connect(autocommit=False) as connection:
        days.write(connection)
    days.relayed(database)
    assert close.close(database.settings, DAY)[0].closed
    assert database.outbox("partitions", "reopen", str(TODAY)).exit_code == 2


@pytest.mark.extended
def test_a_reader_of_the_day_lets_reopening_fail(database: Database) -> None:
    """Guards against a command that waits for a report without end, and every later reader behind it."""
    days.closed(database)
    with database.connect(autocommit=False) as reader:
        reader.execute(f"SELECT count(*) FROM {LEAF}".encode())
        with pytest.raises(psycopg.errors.LockNotAvailable):
            close.reopen(database.settings, DAY)
    assert days.state(database) == "closed"


def test_a_day_without_its_partition_says_how_to_remove_it(database: Database) -> None:
    """Guards against a remedy that removes every day."""
    days.fill(database)
    database.rows(f"DROP TABLE {LEAF}")
    assert _why_not(database).endswith(f"DELETE FROM outbox_days WHERE day = '{DAY}'")


def test_no_day_is_made_behind_closed_ones(database: Database) -> None:
    """Guards against events in a day at which no relay looks any more."""
    days.closed(database)
    with pytest.raises(SetupError, match="are closed"):
        ahead.ensure(database.settings, since=DAY - timedelta(1))
    assert ahead.ensure(database.settings, since=DAY + timedelta(1)).made == 0
    assert ahead.ensure(database.settings, since=TODAY).made == 0
    with pytest.raises(SetupError, match="is in the future"):
        ahead.ensure(database.settings, since=TODAY + timedelta(1))
    shown = database.outbox("partitions", "ensure", "--since", str(DAY - timedelta(1)))
    assert shown.exit_code == 2
    assert "a closed day cannot change" in shown.output


def test_a_distant_day_is_made_in_steps(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one transaction with the locks of years, and work that an interruption undoes."""
    monkeypatch.setattr(ahead, "_DAYS_AT_ONCE", 3)
    least = "SELECT min(day) FROM outbox_days"
    # Another table has the name of the oldest day's partition: what was made before stays.
    oldest = TODAY - timedelta(8)
    database.rows(f"CREATE TABLE {calendar.leaf_of(oldest)} (n int)")
    with pytest.raises(SetupError, match="does not belong to the outbox"):
        ahead.ensure(database.settings, since=oldest)
    assert database.value(least) == TODAY - timedelta(6)
    database.rows(f"DROP TABLE {calendar.leaf_of(oldest)}")
    assert ahead.ensure(database.settings, since=oldest).made == 2
    assert database.value(least) == oldest
    shown = database.outbox("partitions", "ensure", "--since", "0001-01-01")
    assert shown.exit_code == 2
    assert "correct the year" in shown.output


def test_a_gap_behind_the_closed_days_can_be_made(database: Database) -> None:
    """Guards against a relay that looks from the first day that is there, and misses one made before it."""
    days.closed(database)
    gap = DAY + timedelta(1)
    database.rows(f"DROP TABLE {calendar.leaf_of(gap)}")
    database.rows("DELETE FROM outbox_days WHERE day = %s", gap)
    assert database.value("SELECT outbox_open_from()") == gap
    assert ahead.ensure(database.settings, since=gap).made == 1


def test_closing_and_making_days_at_once(database: Database) -> None:
    """Guards against a day made in the moment in which a later one closes."""
    days.fill(database)
    days.relayed(database)
    with database.connect(autocommit=False) as maker:
        maker.execute("SELECT outbox_ensure_partitions(14, %s)", [DAY - timedelta(5)])
        closer = threading.Thread(target=close.close, args=(database.settings, DAY))
        closer.start()
        wait_until(
            lambda: (
                database.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == 1
                or not closer.is_alive()
            )
        )
        assert days.state(database) == "open"
        maker.commit()
        closer.join()
    assert days.state(database) == "closed"
    assert database.value("SELECT outbox_open_from()") == DAY - timedelta(5)


def test_a_closed_day_is_left_out_of_what_relays_read(database: Database) -> None:
    """Guards against planning over every day that is kept, for each poll."""
    from outbox_pipelines.relay import relay_sql

    days.closed(database)
    with database.connect() as connection:
        connection.execute(relay_sql.PLAN_EACH)
        ((open_from,),) = connection.execute(relay_sql.OPEN_FROM)
        given = {
            **{
                "first": "3",
                "end": "900000",
                "target": "3:900000:",
                "last_seq": 0,
                "late": "{}",
                "limit": 10,
                "most": 8000,
            },
            **{"open_from": open_from, "shard": 0, "shards": 1},
        }
        plan = "\n".join(
            row for (row,) in connection.execute(f"EXPLAIN {relay_sql.EVENTS.small_tick}", given)
        )
    assert LEAF not in plan
    assert calendar.leaf_of(TODAY) in plan


def test_wrong_days(database: Database) -> None:
    """Guards against a typo that passes for success."""
    assert database.outbox("partitions", "close", "2020-01-01").exit_code == 2
    shown = database.outbox("partitions", "close", "yesterday")
    assert shown.exit_code == 2
    assert "write a date such as" in shown.output


def test_a_role_that_is_not_the_owner(database: Database) -> None:
    """Guards against a traceback where one word of SQL helps."""
    role = database.role()
    days.fill(database)
    days.relayed(database)
    database.rows(f"SELECT outbox_grant_operator('{role}')")
    shown = database.outbox("partitions", "close", OUTBOX_DSN=f"{database.dsn} user={role}")
    assert shown.exit_code == 2
    assert "the role that owns the outbox" in shown.output
