"""`outbox partitions`: the days of the outbox, as an operator sees and keeps them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.partitions import ahead, calendar, close
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.quality.measurements import Late
from outbox_pipelines.writer import emit
from tests.conftest import wait_until
from tests.days.partitions import days
from tests.schema.servers import Database

# The state of the table so many days later: what was ahead is past.
DAYS_GO_BY = """
DO $$
DECLARE leaf text;
BEGIN
    FOR leaf IN SELECT c.relname FROM pg_class c JOIN pg_inherits i ON i.inhrelid = c.oid
                WHERE i.inhparent = 'outbox'::regclass AND c.relkind = 'r' ORDER BY 1 DESC LIMIT {days}
    LOOP
        EXECUTE format('DROP TABLE %I', leaf);
        DELETE FROM outbox_days WHERE 'outbox_' || to_char(day, 'YYYYMMDD') = leaf;
    END LOOP;
END $$"""


def _ahead(database: Database) -> int:
    with database.connect() as connection:
        return calendar.ahead(connection)


def test_the_days_are_listed_with_state_size_and_rows(database: Database) -> None:
    """Guards against an operator who must know catalogs to see which days there are."""
    with database.connect(autocommit=False) as connection:
        for n in range(50):
            emit(connection, "order", n, "order.placed", {"n": n})
        writer = connection.info.backend_pid
    with database.connect() as connection:
        # At its end it adds its rows to the statistics, also to those of a later ANALYZE.
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        wait_until(lambda: connection.execute(gone, [writer]).fetchone() == (True,), what="the writer's end")
        connection.execute("VACUUM ANALYZE outbox")
    days = calendar.read(database.settings)
    today = datetime.now(UTC).date()
    assert [day.day for day in days] == [today + timedelta(n) for n in range(-1, 15)]
    assert calendar.first(database.settings) == days[0].day
    (now,) = [day for day in days if day.day == today]
    assert (now.state, now.partition, now.rows) == ("open", "attached", 50)
    assert now.size > 8192
    shown = database.outbox("partitions", "list")
    assert shown.exit_code == 0
    assert any(line.split()[:3] == [str(today), "open", "~50"] for line in shown.output.splitlines())
    as_json = json.loads(database.outbox("partitions", "list", "--json").output)
    assert [row["day"] for row in as_json] == [str(day.day) for day in days]


def test_what_lies_ahead_is_made_up_after_days_without_maintenance(database: Database) -> None:
    """Guards against an insert that finds no partition: the business transaction would fail."""
    database.rows(DAYS_GO_BY.format(days=12))
    assert _ahead(database) == 2
    done = database.outbox("partitions", "ensure")
    assert (done.exit_code, done.output) == (0, "created 12; 14 future days have a partition\n")
    assert _ahead(database) == 14
    assert database.outbox("partitions", "ensure").output.startswith("created 0; 14 ")
    assert json.loads(database.outbox("partitions", "ensure", "--ahead", "20", "--json").output) == {
        "made": 6,
        "ahead": 20,
    }


def test_a_day_that_lost_its_partition_counts_as_missing(database: Database) -> None:
    """Guards against a count of the recorded days, where inserts find no partition."""
    day = days.TODAY + timedelta(3)
    database.rows(f"ALTER TABLE outbox DETACH PARTITION {calendar.leaf_of(day)}")
    assert _ahead(database) == 2
    shown = database.outbox("partitions", "list").output
    assert f"{day}  open, detached" in shown
    done = database.outbox("partitions", "ensure")
    assert done.exit_code == 1
    assert done.output.startswith("created 0; 2 future days have a partition\n")
    assert "a detached day returns with `outbox partitions attach DAY`" in done.output
    assert database.outbox("partitions", "attach", str(day)).exit_code == 0
    assert _ahead(database) == 14
    # Closed by a clock that was ahead.
    database.rows("UPDATE outbox_days SET state = 'closed' WHERE day = %s", day)
    assert _ahead(database) == 2
    database.rows("UPDATE outbox_days SET state = 'open' WHERE day = %s", day)
    database.rows(f"ALTER TABLE outbox DETACH PARTITION {calendar.leaf_of(days.TODAY)}")
    assert _ahead(database) == 0


def test_a_partition_that_was_dropped_by_hand_is_made_again(database: Database) -> None:
    """Guards against a future day on which all writers fail, while the checks pass."""
    lost = [days.TODAY + timedelta(n) for n in (0, 3, 4)]
    for day in lost[1:]:
        database.rows(f"DROP TABLE {calendar.leaf_of(day)}")
    assert _ahead(database) == 2
    assert "partitions_ahead: 2 future days with a partition" in database.outbox("status").output
    done = database.outbox("partitions", "ensure", "--ahead", "30")
    assert (done.exit_code, done.output) == (0, "created 18; 30 future days have a partition\n")
    database.rows(f"DROP TABLE {calendar.leaf_of(lost[0])}")
    assert _ahead(database) == 0
    assert ahead.ensure(database.settings) == ahead.Ensured(made=1, ahead=30)
    assert {day.partition for day in calendar.read(database.settings)} == {"attached"}
    with database.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {})


def test_few_days_are_an_exit_code_and_a_remark(database: Database) -> None:
    """Guards against a maintenance that says all is well with a day left."""
    database.rows(DAYS_GO_BY.format(days=14))
    done = database.outbox("partitions", "ensure", "--ahead", "3")
    assert done.exit_code == 1
    assert "fewer than 7 days ahead: increase --ahead" in done.output


def test_two_at_once(database: Database) -> None:
    """Guards against two schedulers, one of which fails on what the other has made."""
    database.rows(DAYS_GO_BY.format(days=10))
    with ThreadPoolExecutor(4) as pool:
        made = [ensured.made for ensured in pool.map(ahead.ensure, [database.settings] * 4)]
    assert sorted(made) == [0, 0, 0, 10]


@pytest.mark.extended
def test_maintenance_of_others_is_waited_for(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run that fails because VACUUM or another DDL was there for a moment."""
    database.rows(DAYS_GO_BY.format(days=2))
    monkeypatch.setattr(ahead, "_TRIES", 1)
    with database.connect(autocommit=False) as other:
        other.execute("LOCK TABLE outbox IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(UnavailableError, match="locked by other maintenance"):
            ahead.ensure(database.settings)
        monkeypatch.setattr(ahead, "_TRIES", 1000)
        found: list[ahead.Ensured] = []
        waiting = threading.Thread(target=lambda: found.append(ahead.ensure(database.settings)))
        waiting.start()
        query = "SELECT count(*) FROM pg_locks WHERE relation = 'outbox'::regclass AND NOT granted"
        wait_until(lambda: database.value(query) == 1, what="the lock to be asked for")
        other.rollback()
        waiting.join(600)
    assert found == [ahead.Ensured(made=2, ahead=14)]


def test_a_role_that_does_not_own_the_table(database: Database) -> None:
    """Guards against an error that does not say who may."""
    role = database.role()
    database.rows(f"SELECT outbox_grant_relay('{role}')")
    database.rows(DAYS_GO_BY.format(days=1))
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role)
    with pytest.raises(SetupError, match="only the role that owns the outbox can create partitions"):
        ahead.ensure(database.settings.model_copy(update={"dsn": dsn}))
    # A relay of this role, which owns another table, does not try.
    database.rows(f"CREATE TABLE another (n int); ALTER TABLE another OWNER TO {role}")
    for user, made in ((role, 0), ("postgres", 1)):
        with database.connect(user=user) as connection:
            assert ahead.top_up(connection, 14) is None
        assert _ahead(database) == 13 + made


def test_a_table_in_the_way(database: Database) -> None:
    """Guards against a stack trace for a name that is taken."""
    day = datetime.now(UTC).date() + timedelta(15)
    database.rows(f"CREATE TABLE outbox_{day:%Y%m%d} (n int)")
    with pytest.raises(SetupError, match="does not belong to the outbox: rename or drop it"):
        ahead.ensure(database.settings, 15)


@pytest.mark.parametrize("days", ["0", "401", "many"])
def test_wrong_numbers(database: Database, days: str) -> None:
    """Guards against thousands of partitions by a slip."""
    assert database.outbox("partitions", "ensure", "--ahead", days).exit_code == 2


def test_without_an_outbox(database: Database) -> None:
    """Guards against a stack trace if OUTBOX_SCHEMA is not set."""
    done = database.outbox("partitions", "ensure", OUTBOX_SCHEMA="elsewhere")
    assert done.exit_code == 2
    assert "run `outbox migrate`" in done.output
    listed = database.outbox("partitions", "list", OUTBOX_SCHEMA="elsewhere")
    assert listed.exit_code == 2
    assert "run `outbox migrate`" in listed.output


def test_status_says_which_days_are_late(database: Database, tmp_path: Path) -> None:
    """Guards against maintenance that has failed for days, unnoticed."""
    # Also in the first hour of a day.
    given = {"retention_days": 0, "close_after_minutes": 0.0}
    settings = days.archiving(database, tmp_path).model_copy(update=given)
    days.fill(database)
    assert outbox_measurements.read(settings).days_late == Late(2, 0, 0)
    shown = database.outbox("status").output
    assert (
        "ERROR         days_closed: 2 days not closed in time\n"
        "              → Run `outbox partitions close`: it names the obstacle" in shown
    )
    unarchived = settings.model_copy(update={"archive": "none", "retention_days": 30})
    assert outbox_measurements.read(unarchived).days_late == Late(2, 0, 0)
    days.relayed(database)
    past = [days.DAY + timedelta(n) for n in range(3)]
    assert [closing.day for closing in close.close(settings)] == past
    assert outbox_measurements.read(settings).days_late == Late(0, 2, 0)
    assert outbox_measurements.read(database.settings).days_late == Late(0, 0, 0)
    assert outbox_measurements.read(unarchived).days_late == Late(0, 0, 0)
    unarchived = settings.model_copy(update={"archive": "none"})
    assert outbox_measurements.read(unarchived).days_late == Late(0, 0, 2)
    assert drop.due(unarchived) == past
    archive.archive(settings, days.DAY)
    assert outbox_measurements.read(settings).days_late == Late(0, 1, 1)
    longer = settings.model_copy(update={"retention_days": 30})
    assert outbox_measurements.read(longer).days_late == Late(0, 1, 0)
    # As a proof leaves it that has failed.
    database.rows("UPDATE outbox_days SET archived_at = archived_at - interval '2 days'")
    assert outbox_measurements.read(longer).days_late == Late(0, 2, 0)
    assert outbox_measurements.read(database.settings).days_late == Late(0, 0, 0)
    database.rows("UPDATE outbox_days SET proven_at = archived_at")
    assert outbox_measurements.read(longer).days_late == Late(0, 1, 0)
    drop.drop(settings, days.DAY)
    database.rows("UPDATE outbox_days SET proven_at = NULL")
    assert outbox_measurements.read(settings).days_late == Late(0, 1, 0)
