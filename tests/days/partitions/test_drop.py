"""Dropping: a day goes only when its file has just been proven equal to its rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop, proof
from outbox_pipelines.days.partitions import calendar, close, partitions_sql
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.settings import Settings
from tests.conftest import wait_until
from tests.days.partitions import days
from tests.days.partitions.days import DAY, TODAY
from tests.schema.servers import Database

LEAF = calendar.leaf_of(DAY)


@pytest.fixture
def archived(database: Database, tmp_path: Path) -> Settings:
    """Settings of an outbox whose DAY is archived."""
    days.closed(database)
    settings = days.archiving(database, tmp_path / "archive")
    archive.archive(settings, DAY)
    return settings


def _is_there(database: Database) -> bool:
    return bool(database.value("SELECT to_regclass(%s) IS NOT NULL", LEAF))


def _is_attached(database: Database) -> bool:
    return bool(
        database.value(
            "SELECT EXISTS (SELECT FROM pg_inherits "
            "WHERE inhrelid = to_regclass(%s) AND NOT inhdetachpending)",
            LEAF,
        )
    )


def test_a_proven_day_is_dropped(database: Database, archived: Settings) -> None:
    """Guards against a table that only grows, and a proof whose time is not the drop's."""
    now = database.value("SELECT clock_timestamp()")
    assert drop.drop(archived, DAY) == drop.Dropped(DAY, 20, True)
    assert database.value("SELECT proven_at FROM outbox_days WHERE day = %s", DAY) > now
    assert not _is_there(database)
    assert days.state(database) == "dropped"
    assert drop.drop(archived, DAY) == drop.Dropped(DAY, None, False)
    with database.connect(autocommit=False) as connection, pytest.raises(psycopg.errors.CheckViolation):
        days.write(connection)


def test_a_day_that_differs_stays(database: Database, archived: Settings) -> None:
    """Guards against G6 broken: the proof of yesterday is not the proof of now."""
    assert archive.verify(archived, DAY).equal
    database.rows(f"ALTER TABLE {LEAF} DISABLE TRIGGER outbox_append_only")
    ((id, seq),) = database.rows(f"SELECT id::text, seq FROM {LEAF} LIMIT 1")
    database.rows(f"UPDATE {LEAF} SET payload = '{{}}' WHERE id = %s", id)
    database.rows(f"ALTER TABLE {LEAF} ENABLE TRIGGER outbox_append_only")
    with pytest.raises(drop.NotProvenError, match="differ") as caught:
        drop.drop(archived, DAY)
    assert f"event {id} (seq {seq}) differs" in str(caught.value)
    assert "find out who changed file or rows. If the rows are correct, run `" in str(caught.value)
    assert _is_attached(database)
    assert days.state(database) == "archived"
    assert database.value("SELECT proven_at IS NULL FROM outbox_days WHERE day = %s", DAY)
    # It is a day of the outbox as before, with its guards.
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        database.rows(f"DELETE FROM {LEAF}")
    with (
        database.connect(autocommit=False) as connection,
        pytest.raises(psycopg.errors.Error, match="closed"),
    ):
        days.write(connection)
    assert database.outbox("migrate", "--check").exit_code == 0
    archive.archive(archived, DAY, again=True)
    assert drop.drop(archived, DAY).now


def test_nothing_half_written_stays(database: Database, archived: Settings) -> None:
    """Guards against files of a crashed run, which are never removed once the day is dropped."""
    writing = Path(archived.archive) / "_outbox" / "writing"
    for name in (f"{DAY}-dead", f"{DAY}.json-dead", "2020-01-01-alive"):
        (writing / name).mkdir(parents=True)
        (writing / name / "object").write_bytes(b"half")
    assert drop.drop(archived, DAY).now
    assert [each.name for each in writing.iterdir()] == ["2020-01-01-alive"]


def test_a_file_that_differs_keeps_the_day(database: Database, archived: Settings) -> None:
    """Guards against rows that go while their only copy is damaged."""
    (file,) = Path(archived.archive).rglob("*.parquet")
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    with pytest.raises(drop.NotProvenError, match="has changed since it was written"):
        drop.drop(archived, DAY)
    assert _is_attached(database)
    file.unlink()
    with pytest.raises(drop.NotProvenError, match="missing"):
        drop.drop(archived, DAY)
    assert _is_attached(database)


def test_what_is_not_ready_is_refused(database: Database, tmp_path: Path) -> None:
    """Guards against a refusal that does not say what helps."""
    days.fill(database)
    settings = days.archiving(database, tmp_path)
    with pytest.raises(NotReadyError, match=f"is open: run `outbox partitions close {DAY}`"):
        drop.drop(settings, DAY)
    days.relayed(database)
    assert database.outbox("partitions", "close").exit_code == 0
    with pytest.raises(NotReadyError, match=f"not archived: run `outbox archive day {DAY}`"):
        drop.drop(settings, DAY)
    shown = database.outbox("partitions", "drop", str(DAY), OUTBOX_ARCHIVE=str(tmp_path))
    assert shown.exit_code == 1
    assert "is not archived" in shown.output
    with pytest.raises(SetupError, match="set OUTBOX_ARCHIVE"):
        drop.drop(database.settings, DAY)
    assert database.outbox("partitions", "drop").exit_code == 2
    assert _is_attached(database)


def test_retention(database: Database, archived: Settings) -> None:
    """Guards against days that go too early, or stay."""
    # DAY is three days back: it ended two days ago.
    assert drop.due(archived.model_copy(update={"retention_days": 3})) == []
    assert drop.due(archived.model_copy(update={"retention_days": 2})) == [DAY]
    settings = archived.model_copy(update={"retention_days": 0})
    assert drop.due(settings) == [DAY]
    shown = database.outbox(
        "partitions", "drop", "--due", OUTBOX_ARCHIVE=archived.archive, OUTBOX_RETENTION_DAYS="0"
    )
    assert shown.exit_code == 0
    assert "20 rows proven equal" in shown.output
    assert drop.due(settings) == []


def test_without_an_archive(database: Database) -> None:
    """Guards against rows that go unarchived because no archive is configured."""
    days.closed(database)
    settings = database.settings.model_copy(update={"retention_days": 0})
    assert drop.due(settings) == []
    by_name = settings.model_copy(update={"archive": "none"})
    assert drop.due(by_name) == [DAY]
    assert drop.drop(by_name, DAY) == drop.Dropped(DAY, None, True)
    assert not _is_there(database)
    found = database.rows("SELECT dropped_at IS NULL, proven_at IS NULL FROM outbox_days WHERE day = %s", DAY)
    assert found == [(False, True)]
    (day,) = [each for each in calendar.read(database.settings) if each.day == DAY]
    assert (day.partition, day.size) == ("gone", 0)
    with pytest.raises(NotReadyError, match="is open"):
        drop.drop(by_name, TODAY)


def test_dead_letters_outlive_their_day(database: Database, tmp_path: Path) -> None:
    """Guards against a dead letter that cannot be replayed, because its day is gone."""
    days.fill(database)
    days.relayed(database)
    ((id, payload),) = database.rows(f"SELECT id::text, payload FROM {LEAF} LIMIT 1")
    database.rows(f"INSERT INTO outbox_parked SELECT *, 'failed' FROM {LEAF} WHERE id = %s", id)
    settings = days.archiving(database, tmp_path)
    archive.archive(settings, DAY)
    drop.drop(settings, DAY)
    shown = database.outbox("dead-letters", "replay", id, "--reason", "mended", "--yes")
    assert shown.exit_code == 0, shown.output
    assert database.rows("SELECT state, payload FROM outbox_parked") == [("replaying", payload)]


@contextmanager
def half_detached(database: Database) -> Iterator[None]:
    """A session has begun to detach DAY, and a report that reads the outbox keeps it from being finished."""
    with database.connect(autocommit=False) as reader:
        reader.execute("SELECT count(*) FROM outbox")
        with database.connect() as owner:
            owner.execute("SET lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                owner.execute(f"ALTER TABLE outbox DETACH PARTITION {LEAF} CONCURRENTLY".encode())
        assert database.value("SELECT count(*) FROM pg_inherits WHERE inhdetachpending") == 1
        yield
        reader.rollback()


def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all waits."""
    monkeypatch.setattr(partitions_sql, "DETACH_LOCK", "SET lock_timeout = '50ms'")
    monkeypatch.setattr(close, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(close, "WAIT_PAUSE", (0.05, 0.05))


def test_a_report_keeps_the_day_as_it_is(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against events that are not seen for as long as a report runs."""
    short(monkeypatch)
    with database.connect(autocommit=False) as reader:
        reader.execute("SELECT count(*) FROM outbox")
        with pytest.raises(NotReadyError, match="not dropped: a long transaction uses the outbox"):
            drop.drop(archived, DAY)
        reader.rollback()
    assert _is_attached(database)
    assert drop.drop(archived, DAY).now


def test_a_session_that_uses_other_tables_is_not_waited_for(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against days that stay because any transaction runs."""
    short(monkeypatch)
    database.rows("CREATE TABLE application (n int)")
    with database.connect(autocommit=False) as other:
        other.execute("SELECT FROM application")
        assert drop.drop(archived, DAY).now


def test_an_interrupted_detach_is_finished(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a day left half detached, which blocks the detaching of every other one."""
    short(monkeypatch)
    other = DAY + timedelta(1)
    days.relayed(database)
    archive.archive(archived, other)
    with half_detached(database):
        with pytest.raises(NotReadyError, match=f"half detached.*or `outbox partitions attach {DAY}`"):
            drop.drop(archived, DAY)
        with pytest.raises(NotReadyError, match="is not attached, a long transaction"):
            close.attach(archived, DAY)
        # Writers go on during that time.
        with database.connect(autocommit=False) as connection:
            connection.execute("SET LOCAL lock_timeout = '1s'")
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES ('order', '1', 'order.placed', '{}')"
            )
    assert drop.drop(archived, other).now
    assert database.value("SELECT count(*) FROM pg_inherits WHERE inhdetachpending") == 0
    assert drop.drop(archived, DAY) == drop.Dropped(DAY, 20, True)


def detached_days(settings: Settings) -> int:
    return outbox_measurements.read(settings).days_detached


def test_what_is_left_detached_is_seen_and_attached(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against events that are invisible, that no check reports, and that no command brings back."""
    short(monkeypatch)
    assert detached_days(archived) == 0
    assert database.outbox("partitions", "attach", str(DAY)).output == f"{DAY}  was already attached\n"
    with half_detached(database):
        assert detached_days(archived) == 1
        assert f"{DAY}  archived, detaching" in database.outbox("partitions", "list").output
    # Killed between detaching and dropping.
    with monkeypatch.context() as killed:
        killed.setattr(drop, "_prove_and_drop", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drop.drop(archived, DAY)
    assert not _is_attached(database)
    assert f"{DAY}  archived, detached" in database.outbox("partitions", "list").output
    assert detached_days(archived) == 1
    # Locks of other kinds with the same numbers: of another database, and of two keys.
    key = database.value(
        "SELECT hashtextextended('outbox day ' || %s::date, 'outbox'::regclass::oid::bigint)", DAY
    )
    elsewhere = psycopg.connect(psycopg.conninfo.make_conninfo(archived.dsn, dbname="postgres"))
    with elsewhere, database.connect() as other:
        elsewhere.execute("SELECT pg_advisory_lock(%s::bigint)", [key])
        other.execute(
            "SELECT pg_advisory_lock(%(k)s::bit(64)::bit(32)::int, %(k)s::bit(32)::int)", {"k": key}
        )
        assert detached_days(archived) == 1
    with calendar.working_at(archived, DAY):
        # A process is at work.
        assert detached_days(archived) == 0
    shown = database.outbox("partitions", "attach", str(DAY))
    assert (shown.exit_code, shown.output) == (0, f"{DAY}  attached\n")
    assert _is_attached(database)
    assert detached_days(archived) == 0
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        database.rows(f"DELETE FROM {LEAF}")
    assert database.outbox("migrate", "--check").exit_code == 0
    assert drop.drop(archived, DAY).now
    # What has the name of a dropped day's partition is no day.
    database.rows(f"CREATE TABLE {LEAF} (LIKE outbox)")
    assert detached_days(archived) == 0
    database.rows(f"DROP TABLE {LEAF}")
    assert (
        f"outbox archive restore {DAY} --attach" in database.outbox("partitions", "attach", str(DAY)).output
    )


def test_a_view_on_the_partition_keeps_the_day(database: Database, archived: Settings) -> None:
    """Guards against a partition that is detached and cannot be dropped."""
    for name in ("b_report", "a_report"):
        database.rows(f"CREATE VIEW {name} AS SELECT * FROM {LEAF}")
    with pytest.raises(NotReadyError, match=f" a_report depends on {LEAF}: drop it first"):
        drop.drop(archived, DAY)
    assert _is_attached(database)


def test_a_rule_of_the_partition_is_dropped_with_it(database: Database, archived: Settings) -> None:
    """Guards against a day that stays because its partition depends on itself."""
    database.rows(
        f"CREATE RULE kept AS ON DELETE TO {LEAF} WHERE OLD.seq < 0 DO ALSO SELECT count(*) FROM {LEAF}"
    )
    # The default partition of another table.
    database.rows("CREATE TABLE theirs (n int) PARTITION BY LIST (n)")
    database.rows("CREATE TABLE theirs_rest PARTITION OF theirs DEFAULT")
    assert drop.drop(archived, DAY).rows == 20


def test_the_archive_is_unavailable_before(database: Database, archived: Settings) -> None:
    """Guards against a day that is detached although its archive cannot be read."""
    gone = archived.model_copy(update={"archive": "/proc/none"})
    with pytest.raises(SetupError, match="has no archive"):
        drop.drop(gone, DAY)
    assert _is_attached(database)


@pytest.mark.parametrize("trouble", ["archive", "statement_timeout", "view", "session", "interrupt"])
def test_whatever_fails_the_day_is_attached_again(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Guards against a day whose events vanish because something failed behind the detaching."""
    detach = drop._detach

    def detached_then(connection: Connection, day: date) -> None:
        detach(connection, day)
        assert not _is_attached(database)
        if trouble == "archive":
            monkeypatch.setattr(proof, "prove", Mock(side_effect=UnavailableError("the archive refuses")))
        elif trouble == "statement_timeout":
            connection.execute("SET statement_timeout = '1ms'")
            monkeypatch.setattr(partitions_sql, "LOCK_DETACHED", "LOCK TABLE {leaf}; SELECT pg_sleep(1)")
        elif trouble == "view":
            database.rows(f"CREATE VIEW somebodys_report AS SELECT * FROM {LEAF}")
        elif trouble == "session":
            database.rows(f"SELECT pg_terminate_backend({connection.info.backend_pid})")
        else:
            monkeypatch.setattr(proof, "prove", Mock(side_effect=KeyboardInterrupt))

    monkeypatch.setattr(drop, "_detach", detached_then)
    with pytest.raises((SetupError, KeyboardInterrupt)):
        drop.drop(archived, DAY)
    assert _is_attached(database)
    assert days.state(database) == "archived"
    assert database.value("SELECT proven_at IS NULL FROM outbox_days WHERE day = %s", DAY)


def test_settings_of_the_role_do_not_end_the_work(database: Database, archived: Settings) -> None:
    """Guards against a timeout that is set for all of a database's sessions."""
    for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        database.rows(
            f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {name} = 600000', current_database()); END $$"
        )
        assert database.value(f"SHOW {name}") == "10min"
        with calendar.working_at(archived, DAY) as connection:
            assert connection.execute(f"SHOW {name}".encode()).fetchall() == [("0",)]


@pytest.mark.parametrize(
    "style",
    ["German", *(pytest.param(each, marks=pytest.mark.extended) for each in ("SQL, DMY", "Postgres, MDY"))],
)
def test_another_date_style(database: Database, tmp_path: Path, style: str) -> None:
    """Guards against commands that crash on how a database prints its dates."""
    database.rows(
        f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET DateStyle = \"{style}\"', current_database()); "
        "EXECUTE format('ALTER DATABASE %I SET IntervalStyle = iso_8601', current_database()); END $$"
    )
    days.fill(database)
    days.relayed(database)
    archive = str(tmp_path / "archive")
    for command in (
        ("partitions", "list"),
        ("partitions", "close"),
        ("archive", "day", str(DAY)),
        ("archive", "verify", str(DAY)),
        ("status",),
        ("partitions", "drop", str(DAY)),
        ("archive", "restore", str(DAY), "--attach"),
        ("archive", "history", "order", "1"),
    ):
        shown = database.outbox(*command, OUTBOX_ARCHIVE=archive)
        assert shown.exit_code == 0 or command[0] == "status", shown.output
        assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception


def test_one_day_that_stays_holds_up_no_other(database: Database, archived: Settings) -> None:
    """Guards against a table that grows because the oldest day cannot be dropped."""
    days.relayed(database)
    archive.archive(archived, DAY + timedelta(1))
    next(Path(archived.archive).rglob(f"*{DAY}/*.parquet")).unlink()
    environment = {"OUTBOX_ARCHIVE": archived.archive, "OUTBOX_RETENTION_DAYS": "0"}
    shown = database.outbox("partitions", "drop", "--due", **environment)
    assert shown.exit_code == 1
    assert f"partition {DAY} not dropped" in shown.stderr
    assert f"{DAY + timedelta(1)}  dropped" in shown.stdout
    shown = database.outbox("partitions", "drop", "--due", "--json", **environment)
    assert (shown.exit_code, json.loads(shown.stdout)) == (1, [])


def test_a_partition_that_was_dropped_by_hand(database: Database, archived: Settings) -> None:
    """Guards against a schedule that fails permanently because of a change by hand."""
    database.rows(f"DROP TABLE {LEAF}")
    assert drop.drop(archived, DAY) == drop.Dropped(DAY, None, True)
    assert days.state(database) == "dropped"


def test_a_partition_that_was_dropped_by_hand_without_a_good_file(
    database: Database, archived: Settings
) -> None:
    """Guards against a loss that is written down as a success."""
    database.rows(f"DROP TABLE {LEAF}")
    (file,) = Path(archived.archive).rglob("*.parquet")
    file.unlink()
    with pytest.raises(drop.NotProvenError, match=r"does not exist, and its .* missing .*: restore the ar"):
        drop.drop(archived, DAY)
    assert days.state(database) == "archived"


@pytest.mark.extended
def test_two_at_once(database: Database, archived: Settings) -> None:
    """Guards against a proof and a drop that run at the same time."""
    with (
        calendar.working_at(archived, DAY),
        pytest.raises(NotReadyError, match=r"by session \d+ of role .*: wait until it ends"),
    ):
        drop.drop(archived, DAY)
    assert drop.drop(archived, DAY).now


def test_nothing_changes_between_proof_and_drop(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an owner who inserts into the detached table after its rows were summed."""
    summed, tried = threading.Event(), threading.Event()
    prove = proof.prove

    def proving(*given: Any) -> object:
        found = prove(*given)
        # The first proof is of the partition that is attached.
        if not _is_attached(database):
            summed.set()
            assert tried.wait(600)
        return found

    monkeypatch.setattr(proof, "prove", proving)
    dropper = threading.Thread(target=drop.drop, args=(archived, DAY))
    dropper.start()
    assert summed.wait(600)
    with database.connect() as owner:
        owner.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            owner.execute(f"ALTER TABLE {LEAF} DISABLE TRIGGER USER".encode())
    tried.set()
    dropper.join()
    wait_until(lambda: days.state(database) == "dropped")


def test_a_role_that_is_not_the_owner(database: Database, archived: Settings) -> None:
    """Guards against a traceback where one word of SQL helps."""
    role = database.role()
    database.rows(f"SELECT outbox_grant_operator('{role}')")
    shown = database.outbox(
        "partitions",
        "drop",
        str(DAY),
        OUTBOX_DSN=f"{database.dsn} user={role}",
        OUTBOX_ARCHIVE=archived.archive,
    )
    assert shown.exit_code == 2
    assert "the role that owns the outbox" in shown.output
    assert _is_attached(database)


def test_a_session_that_is_going_is_waited_for(database: Database, archived: Settings) -> None:
    """Guards against a refusal by the lock of a session that was closed, or killed, a moment ago."""
    with database.connect() as going:
        assert partitions_sql.DAY_LOCK.take(going, {"day": DAY}) is None
        closer = threading.Timer(0.5, going.close)
        closer.start()
        assert drop.drop(archived, DAY).now
        closer.join()
