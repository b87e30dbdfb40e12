"""Dropping: a day goes only when its file has just been proven equal to its rows."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.archive import day as archive
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.partitions import calendar, drop
from outbox_pipelines.settings import Settings
from tests.conftest import wait_until
from tests.partitions import days
from tests.partitions.days import DAY, TODAY
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
            "SELECT coalesce((SELECT relispartition FROM pg_class WHERE relname = %s), false)", LEAF
        )
    )


def test_a_proven_day_is_dropped(database: Database, archived: Settings) -> None:
    """Guards against a table that only grows."""
    assert drop.drop(archived, DAY) == drop.Dropped(DAY, 20, True)
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
    with pytest.raises(drop.NotProvenError, match="differ") as caught:
        drop.drop(archived, DAY)
    assert f"event {id} (seq {seq}) differs" in str(caught.value)
    assert "--again" in str(caught.value)
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
    with pytest.raises(NotReadyError, match=f"is open: see `outbox partitions close {DAY}`"):
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
    """Guards against rows that go unarchived because nobody has named an archive."""
    days.closed(database)
    settings = database.settings.model_copy(update={"retention_days": 0})
    assert drop.due(settings) == []
    by_name = settings.model_copy(update={"archive": "none"})
    assert drop.due(by_name) == [DAY]
    assert drop.drop(by_name, DAY) == drop.Dropped(DAY, None, True)
    assert not _is_there(database)
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


def test_an_interrupted_detach_is_finished(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a day left half detached, which blocks the detaching of every other one."""
    monkeypatch.setattr(drop.queries, "DETACH_LOCK", "SET lock_timeout = '50ms'")
    monkeypatch.setattr(drop, "_SECONDS", 0.2)
    other = DAY + timedelta(1)
    days.relayed(database)
    archive.archive(archived, other)
    with database.connect(autocommit=False) as reader:
        reader.execute("SELECT count(*) FROM outbox")
        with pytest.raises(NotReadyError, match="long transaction"):
            drop.drop(archived, DAY)
        assert database.value("SELECT count(*) FROM pg_inherits WHERE inhdetachpending") == 1
        # Writers and the day's readers go on meanwhile.
        with database.connect(autocommit=False) as connection:
            connection.execute("SET LOCAL lock_timeout = '1s'")
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                "VALUES ('order', '1', 'order.placed', '{}')"
            )
        reader.rollback()
    assert drop.drop(archived, other).now
    assert database.value("SELECT count(*) FROM pg_inherits WHERE inhdetachpending") == 0
    assert drop.drop(archived, DAY) == drop.Dropped(DAY, 20, True)


def test_a_partition_that_was_dropped_by_hand(database: Database, archived: Settings) -> None:
    """Guards against a schedule that fails for ever on what somebody has done by hand."""
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
    with pytest.raises(drop.NotProvenError, match="is gone"):
        drop.drop(archived, DAY)
    assert days.state(database) == "archived"


def test_two_at_once(database: Database, archived: Settings) -> None:
    """Guards against a proof and a drop beside each other."""
    with (
        calendar.working_at(archived, DAY),
        pytest.raises(NotReadyError, match="by somebody else: wait for it"),
    ):
        drop.drop(archived, DAY)
    assert drop.drop(archived, DAY).now


def test_nothing_changes_between_proof_and_drop(
    database: Database, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an owner who inserts into the detached table after its rows were summed."""
    summed, tried = threading.Event(), threading.Event()
    prove = drop.proof.prove

    def proving(*given: object) -> object:
        found = prove(*given)  # type: ignore[arg-type]
        summed.set()
        assert tried.wait(10)
        return found

    monkeypatch.setattr(drop.proof, "prove", proving)
    dropper = threading.Thread(target=drop.drop, args=(archived, DAY))
    dropper.start()
    assert summed.wait(20)
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
        going.execute(calendar.queries.TRY_DAY, {"day": DAY})
        closer = threading.Timer(0.5, going.close)
        closer.start()
        assert drop.drop(archived, DAY).now
        closer.join()
