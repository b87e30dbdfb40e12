"""Restoring: a day comes back as it was, or not at all."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.days.archive import archive_sql, drop, restore
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.partitions import calendar
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import Settings
from tests.days.archive.days import past_day, rows
from tests.schema.servers import Database

_COLUMNS = """
SELECT id, seq, aggregate_type, aggregate_id, event_type, payload::text, headers::text, idempotency_key,
       correlation_id, causation_id, traceparent, version, created_at FROM {} ORDER BY seq"""


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    return database.settings.model_copy(update={"archive": str(tmp_path / "archive")})


@pytest.fixture
def before() -> list[tuple[object, ...]]:
    """What the day contained, filled by the fixture below."""
    return []


@pytest.fixture
def dropped(database: Database, settings: Settings, before: list[tuple[object, ...]]) -> date:
    """A day with events of all shapes that is archived and dropped."""
    day = past_day(database)
    archive.archive(settings, day)
    before += database.rows(_COLUMNS.format(calendar.leaf_of(day)))
    drop.drop(settings, day)
    return day


def test_as_a_table(
    database: Database, settings: Settings, dropped: date, before: list[tuple[object, ...]]
) -> None:
    """Guards against a restored row that is not the one that was archived."""
    restored = restore.restore(settings, dropped)
    assert restored == restore.Restored(dropped, f"outbox_restored_{dropped:%Y%m%d}", len(before))
    assert before
    assert database.rows(_COLUMNS.format(restored.table)) == before
    assert database.outbox("migrate", "--check").exit_code == 0
    with pytest.raises(NotReadyError, match=" already exists"):
        restore.restore(settings, dropped)


def test_attached_again(
    database: Database, settings: Settings, dropped: date, before: list[tuple[object, ...]]
) -> None:
    """Guards against a day that comes back without its guards, and is published a second time."""
    shown = database.outbox("archive", "restore", str(dropped), "--attach", OUTBOX_ARCHIVE=settings.archive)
    assert shown.exit_code == 0, shown.output
    leaf = calendar.leaf_of(dropped)
    assert f"{len(before)} rows in {leaf}, proven equal" in shown.output
    bounds = calendar.bounds_of(dropped)
    in_day = f"outbox WHERE created_at >= '{bounds[0]}' AND created_at < '{bounds[1]}'"
    assert database.rows(_COLUMNS.format(in_day)) == before
    assert database.value("SELECT state FROM outbox_days WHERE day = %s", dropped) == "archived"
    unpublished = "SELECT count(*) FROM outbox, outbox_shards WHERE NOT pg_visible_in_snapshot(tx, done)"
    assert database.value(unpublished) == 0
    # Those that the restore makes: ATTACH would make each that it does not find, under its lock.
    indexes = "SELECT count(*) FROM pg_index WHERE indrelid = %s::regclass"
    assert database.value(indexes, leaf) == database.value(indexes, "outbox")
    assert {status for (status,) in database.rows("SELECT DISTINCT status FROM outbox_events")} == {
        "PROCESSED"
    }
    for change in ("DELETE FROM {}", "UPDATE {} SET version = 1", "TRUNCATE {}"):
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="the table is append-only"):
            database.rows(change.format(leaf))
    names = "aggregate_type, aggregate_id, event_type, payload, created_at"
    for into in (leaf, "outbox"):
        # With a seq and a tx that the database draws, and as the owner: the closed day itself refuses it.
        with database.connect(autocommit=False) as connection:
            connection.execute("SET LOCAL outbox.backfill = on")
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=f"{leaf} is closed"):
                connection.execute(f"INSERT INTO {into} ({names}) SELECT {names} FROM {leaf}".encode())
    assert database.outbox("migrate", "--check").exit_code == 0
    # And it goes again, as it went.
    assert archive.verify(settings, dropped).equal
    assert drop.drop(settings, dropped).rows == len(before)


def test_a_damaged_file_is_not_restored(database: Database, settings: Settings, dropped: date) -> None:
    """Guards against a table that looks like the day and is not."""
    (file,) = Path(settings.archive).rglob("*.parquet")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(SetupError, match=r"not restored.*has changed"):
        restore.restore(settings, dropped)
    assert database.value("SELECT count(*) FROM pg_class WHERE relname LIKE 'outbox_restored%%'") == 0


def test_rows_that_differ_from_the_manifest_are_not_kept(
    database: Database, settings: Settings, dropped: date, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a restore that trusts its own copying."""
    # The first row is taken for names.
    monkeypatch.setattr(archive_sql, "COPY", archive_sql.COPY.replace("csv", "csv, HEADER"))
    with pytest.raises(SetupError, match="differ from the manifest"):
        restore.restore(settings, dropped)
    assert database.value("SELECT count(*) FROM pg_class WHERE relname LIKE 'outbox_restored%%'") == 0


def test_into_another_database(
    settings: Settings, dropped: date, empty: Database, before: list[tuple[object, ...]]
) -> None:
    """Guards against an archive that can be read only where it was written."""
    assert empty.outbox("migrate").exit_code == 0
    elsewhere = empty.settings.model_copy(update={"archive": settings.archive})
    assert restore.restore(elsewhere, dropped).rows == len(before)
    with pytest.raises(NotReadyError, match="only a dropped day can be attached"):
        restore.restore(elsewhere, dropped, attach=True)


def test_what_is_not_there(database: Database, settings: Settings, dropped: date) -> None:
    """Guards against a traceback for a typo."""
    shown = database.outbox("archive", "restore", "2020-01-01", OUTBOX_ARCHIVE=settings.archive)
    assert shown.exit_code == 2
    assert "has no manifest of 2020-01-01" in shown.output
    day = calendar.read(settings)[-1].day
    with pytest.raises(NotReadyError, match="is open"):
        restore.restore(settings, day, attach=True)


def test_again_keeps_when_events_were_published(database: Database, settings: Settings) -> None:
    """Guards against times of publishing that are overwritten by those of today: the day was restored."""
    day = past_day(database)
    archive.archive(settings, day)
    before = rows(settings, day)
    assert any(row["published_at"] for row in before)
    drop.drop(settings, day)
    restore.restore(settings, day, attach=True)
    database.rows("UPDATE outbox_progress SET at = at + interval '1 minute'")
    assert not archive.archive(settings, day, again=True).written
    assert rows(settings, day) == before
    # Without its file nothing is known; not a wrong time.
    (file,) = Path(settings.archive).rglob("*.parquet")
    file.unlink()
    assert archive.archive(settings, day, again=True).written
    assert {row["published_at"] for row in rows(settings, day)} == {None}
    assert archive.verify(settings, day).equal
