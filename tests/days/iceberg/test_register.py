"""The archived days in an Iceberg table, read by pyiceberg with its own access to files."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.utils.config import Config

from outbox_pipelines.core.secret import Secret
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop, export
from outbox_pipelines.days.archive.expire import expire
from outbox_pipelines.days.archive.manifest import now
from outbox_pipelines.days.archive.redact import redact
from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.days.iceberg import compare, register
from outbox_pipelines.days.iceberg.iceberg_catalog import ArchiveIO, root_of
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import Settings, load_settings
from tests.days.archive import buckets
from tests.days.archive.days import (
    days_ago,
    directory,
    edit_manifest,
    file,
    make_days,
    past_day,
    publish,
    rows,
    write,
)
from tests.days.iceberg.conftest import engine, table
from tests.schema.servers import Database

EARLY, DAY = days_ago(5), days_ago(3)


def archived(database: Database, settings: Settings, *chosen: date) -> None:
    """Days with an event each."""
    make_days(database, *chosen)
    for day in chosen:
        write(database, day, [{"aggregate_id": str(day)}])
    publish(database)
    for day in chosen:
        days.archive(settings, day)


def read(lake: str) -> list[dict[str, Any]]:
    return table(lake).scan().to_arrow().to_pylist()  # type: ignore[no-any-return]


@pytest.mark.extended
def test_a_catalog_in_the_database_of_the_outbox(database: Database, settings: Settings) -> None:
    """Guards against tables of pyiceberg among those of the outbox, where engines log in."""
    archived(database, settings, DAY)
    there = settings.model_copy(update={"iceberg": Secret(database.dsn)})
    count = "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'iceberg%%' AND schemaname = %s"
    with pytest.raises(SetupError, match=r"in schema public: name another database, or create a schema"):
        register(there)
    assert database.value(count, "public") == 0
    database.rows("CREATE SCHEMA lake")
    beside = psycopg.conninfo.make_conninfo(database.dsn, options="-csearch_path=lake")
    assert register(settings.model_copy(update={"iceberg": Secret(beside)})).added == (DAY,)
    assert (database.value(count, "public"), database.value(count, "lake")) == (0, 2)


def test_days_are_registered_once(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a table that lacks a day or has one twice, against a file that is written, and against
    an empty day that is registered for ever."""
    day, empty = past_day(database), days_ago(4)
    make_days(database, empty)
    for each in (empty, day):
        days.archive(settings, each)
    before = file(settings, day).stat()
    done = register(settings)
    assert (done.table, done.added, done.unchanged) == ("outbox.events", (empty, day), 0)
    for _ in range(2):
        assert read(lake) == rows(settings, day)
        done = register(settings)
        assert (done.added, done.replaced, done.unchanged, done.differences) == ((), (), 2, ())
    after = file(settings, day).stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert [compare(settings, each) for each in (empty, day)] == [(), ()]
    assert len(table(lake).snapshots()) == 1
    assert table(lake).properties["gc.enabled"] == "false"


def test_only_the_empty_days_of_a_table(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a first day without events that no snapshot can have."""
    make_days(database, EARLY)
    publish(database)
    days.archive(settings, EARLY)
    assert register(settings).added == (EARLY,)
    assert read(lake) == []
    assert register(settings).unchanged == 1


@pytest.mark.extended
def test_a_day_that_is_changed(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a table that keeps what was redacted or has expired, or names a file that is deleted."""
    archived(database, settings, EARLY, DAY)
    register(settings)
    for each in (EARLY, DAY):
        drop.drop(settings, each)
    redact(settings, DAY, "true", ["total"], reason="r", actor="a")
    update = {"retention_days": 1, "archive_retention_days": {"*": (DAY - EARLY).days + 2}}
    assert [each.day for each in expire(settings.model_copy(update=update), actor="a")] == [EARLY]
    for each in (EARLY, DAY):
        (difference,) = compare(settings, each)
        assert "has its former file: run `outbox archive register`" in difference
    assert register(settings).replaced == (EARLY, DAY)
    assert [each["payload"] for each in read(lake)] == ['{"total": "outbox-erased"}']
    assert [compare(settings, each) for each in (EARLY, DAY)] == [(), ()]


def test_a_filter_on_the_time_opens_one_file(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a table whose readers open every day."""
    archived(database, settings, EARLY, DAY)
    register(settings)
    (task,) = table(lake).scan(row_filter=f"created_at >= '{DAY}T00:00:00+00:00'").plan_files()
    assert task.file.file_path == f"file://{file(settings, DAY)}"


def test_a_day_that_is_archived_again(
    database: Database, settings: Settings, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows of both files, and against a snapshot in between that has neither."""
    archived(database, settings, EARLY, DAY)
    register(settings)
    database.rows("INSERT INTO outbox_parked SELECT o.*, 'failed', 3, NULL, 'large' FROM outbox o")
    days.archive(settings, DAY, again=True)
    (difference,) = compare(settings, DAY)
    assert "has its former file: run `outbox archive register`" in difference
    done = register(settings)
    assert (done.added, done.replaced, done.unchanged) == ((), (DAY,), 1)
    assert sorted(each["status"] for each in read(lake)) == ["FAILED", "PROCESSED"]
    assert [each.summary and each.summary.operation.value for each in table(lake).snapshots()] == [
        "append",
        "overwrite",
    ]
    # The same file with another manifest.
    monkeypatch.setattr(export, "now", lambda: now() + timedelta(hours=1))
    days.archive(settings, DAY, again=True)
    assert register(settings).replaced == (DAY,)
    last = table(lake).snapshots()[-1].summary
    assert last is not None
    assert last.operation.value == "append"
    assert len(read(lake)) == 2
    assert compare(settings, DAY) == ()


def test_registrations_at_the_same_time(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a day that two processes add."""
    archived(database, settings, EARLY, DAY)
    results: list[int] = []

    def run() -> None:
        # One that waits too long is refused.
        with suppress(NotReadyError):
            results.append(len(register(settings).added))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(results) == 2
    assert len(read(lake)) == 2


@pytest.mark.extended
def test_columns_of_users(database: Database, settings: Settings, lake: str) -> None:
    """Guards against values under another column's name, of another type, or in two columns of one name."""
    chosen = [days_ago(ago) for ago in (6, 5, 4, 3)]
    make_days(database, *chosen)
    for day, change, value in zip(
        chosen,
        (
            "ADD COLUMN note int",
            "ALTER COLUMN note TYPE bigint",
            "ALTER COLUMN note TYPE text",
            'RENAME COLUMN note TO "Note"',
        ),
        (1, 2**40, "three", "four"),
        strict=True,
    ):
        database.rows(f"ALTER TABLE outbox {change}")
        write(database, day)
        name = '"Note"' if value == "four" else "note"
        with database.connect() as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(f"UPDATE outbox SET {name} = %s WHERE created_at::date = %s", [value, day])
        publish(database)
        days.archive(settings, day)
        register(settings)
    found = sorted(read(lake), key=lambda each: each["seq"])
    assert [(each["note"], each["note_string"]) for each in found] == [
        (1, None),
        (2**40, None),
        (None, "three"),
        (None, "four"),
    ]
    names = [each.casefold() for each in table(lake).schema().column_names]
    assert len(set(names)) == len(names) == 19
    # All at once, from the manifests.
    register(settings, again=True)
    assert len(read(lake)) == 4
    assert table(lake).scan().count() == 4


def _rewrite(lake: str, day: date, *, keeps: bool) -> None:
    """What a compaction does: the rows of a day in a file of its own, instead of ours or beside it."""
    found = table(lake)
    (task,) = found.scan(row_filter=f"created_at < '{day}T23:59:59+00:00'").plan_files()
    place = Path(found.location().removeprefix("file://"), "data", "compacted.parquet")
    place.parent.mkdir()
    shutil.copy(task.file.file_path.removeprefix("file://"), place)
    theirs = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"file://{place}",
        file_format=FileFormat.PARQUET,
        partition=task.file.partition,
        record_count=task.file.record_count,
        file_size_in_bytes=task.file.file_size_in_bytes,
    )
    theirs.spec_id = task.file.spec_id
    with found.transaction() as transaction:
        update = transaction.update_snapshot()
        with update.fast_append() if keeps else update.overwrite() as producer:
            producer.append_data_file(theirs)
            if not keeps:
                producer.delete_data_file(task.file)


@pytest.mark.extended
@pytest.mark.parametrize("how", ["rewritten", "deleted", "added"])
def test_what_another_engine_has_changed(database: Database, settings: Settings, lake: str, how: str) -> None:
    """Guards against rows that a compaction and a registration both add, and a change that stays unseen."""
    archived(database, settings, EARLY, DAY)
    register(settings)
    if how == "deleted":
        table(lake).delete(f"aggregate_id = '{EARLY}'")
    else:
        _rewrite(lake, EARLY, keeps=how == "added")
    count = len(read(lake))
    done = register(settings)
    (difference,) = done.differences
    assert difference.startswith(f"{EARLY}: another engine has ")
    assert (done.unchanged, len(read(lake))) == (1, count)
    (difference,) = compare(settings, EARLY)
    assert "another engine has " in difference
    assert compare(settings, DAY) == ()
    assert register(settings, again=True).added == (EARLY, DAY)
    assert len(read(lake)) == 2
    assert file(settings, EARLY).exists()


def test_another_partitioning(database: Database, settings: Settings, lake: str) -> None:
    """Guards against days that cannot be distinguished any more."""
    archived(database, settings, EARLY)
    register(settings)
    with table(lake).update_spec() as update:
        update.add_identity("event_type")
    with pytest.raises(SetupError, match="has changed the columns or the partitions"):
        register(settings)
    assert register(settings, again=True).added == (EARLY,)


def test_a_table_that_is_not_ours(database: Database, settings: Settings, lake: str) -> None:
    """Guards against days in a table of others, and against one that is dropped."""
    archived(database, settings, EARLY)
    theirs = engine(lake)
    theirs.create_namespace("outbox")
    schema = pa.schema([pa.field("name", pa.string())])
    theirs.create_table("outbox.events", schema, location=f"file://{settings.archive}/_outbox/iceberg")
    for again in (False, True):
        with pytest.raises(SetupError, match=r"a table outbox\.events that the outbox did not create"):
            register(settings, again=again)
    theirs.drop_table("outbox.events")
    register(settings)
    table(lake).transaction().set_properties({"outbox.archive": "another"}).commit_transaction()
    for again in (False, True):
        with pytest.raises(SetupError, match="is of another outbox's archive"):
            register(settings, again=again)
    with pytest.raises(SetupError, match="is of another outbox's archive"):
        compare(settings, EARLY)


def test_an_archive_that_has_moved(database: Database, settings: Settings, lake: str, tmp_path: Path) -> None:
    """Guards against a table of files that are elsewhere, and against one path in two spellings."""
    archived(database, settings, EARLY)
    register(settings)
    # The same place, written differently.
    other = settings.model_copy(update={"archive": f"file://{settings.archive}/../an archive/"})
    assert register(other).unchanged == 1
    Path(settings.archive).rename(tmp_path / "moved")
    moved = settings.model_copy(update={"archive": str(tmp_path / "moved")})
    with pytest.raises(SetupError, match="it has moved"):
        register(moved)
    assert register(moved, again=True).added == (EARLY,)
    assert len(read(lake)) == 1


def test_a_catalog_that_does_not_answer(database: Database, settings: Settings, lake: str) -> None:
    """Guards against an archive that waits for a catalog, and against a password in a message."""
    archived(database, settings, EARLY)
    away = settings.model_copy(update={"iceberg": Secret("postgresql://u:pass-word@127.0.0.1:9/lake")})
    for call in (lambda: register(away), lambda: compare(away, EARLY)):
        with pytest.raises(UnavailableError, match=r"the Iceberg catalog .* refused") as raised:
            call()
        assert "pass-word" not in str(raised.value)
    archived(database, away, DAY)
    assert days.verify(away, DAY).equal
    done = database.outbox(
        *("archive", "verify", str(DAY)),
        OUTBOX_ARCHIVE=settings.archive,
        OUTBOX_ICEBERG="postgresql://u:pass-word@127.0.0.1:9/lake",
    )
    assert (done.exit_code, done.stdout) == (2, f"{DAY}: 1 row proven equal\n")
    assert "the Iceberg catalog" in done.stderr
    assert "pass-word" not in done.output


def test_a_role_without_rights(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a stack trace where the catalog's tables are others'."""
    archived(database, settings, EARLY)
    register(settings)
    role = database.role()
    refused = settings.model_copy(update={"iceberg": Secret(lake.replace("user=postgres", f"user={role}"))})
    with pytest.raises(UnavailableError, match="permission denied for table iceberg_tables"):
        register(refused)


def test_a_file_or_a_manifest_that_is_lost(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a table that no engine can read, because one file is missing."""
    archived(database, settings, EARLY, DAY)
    lost = file(settings, EARLY)
    lost.rename(lost.with_suffix(".away"))
    edit_manifest(settings, DAY, tool="an editor")
    done = register(settings)
    first, second = done.differences
    assert f"{EARLY}: {lost.name} is missing" in first
    assert f"{DAY}: its manifest is missing, or has changed" in second
    assert done.added == ()
    assert len(table(lake).snapshots()) == 0
    lost.with_suffix(".away").rename(lost)
    assert register(settings).added == (EARLY,)


def test_a_day_that_the_outbox_no_longer_knows(database: Database, settings: Settings, lake: str) -> None:
    """Guards against a restored database whose table has more days than it, without a word."""
    archived(database, settings, EARLY, DAY)
    register(settings)
    database.rows(
        "UPDATE outbox_days SET state = 'closed', manifest_sha256 = NULL, archive = NULL WHERE day = %s", DAY
    )
    (difference,) = register(settings).differences
    assert difference == f"{DAY}: it is in the Iceberg table, but the outbox has not archived it"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_who_may_read_the_metadata(database: Database, settings: Settings, umask: int) -> None:
    """Guards against analysts who may read the files, but not what leads to them, and the other way."""
    group = settings.model_copy(update={"archive_readers": "group"})
    archived(database, group, EARLY)
    before = os.umask(umask)
    try:
        register(group)
    finally:
        os.umask(before)
    found = [*Path(settings.archive, "_outbox", "iceberg").rglob("*")]
    assert {each.stat().st_mode & 0o777 for each in found if each.is_file()} == {0o640}
    assert {each.stat().st_mode & 0o777 for each in found if each.is_dir()} == {0o750}


@pytest.mark.extended
def test_a_bucket(database: Database, settings: Settings, lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a table that only ever worked in a directory."""
    with buckets.serving() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # What another test has left in this process's buckets is there.
        place = f"{buckets.URL}/iceberg"
        in_bucket = settings.model_copy(update={"archive": f"{place}/"})
        archived(database, in_bucket, EARLY)
        assert register(in_bucket).added == (EARLY,)
        assert register(in_bucket.model_copy(update={"archive": place})).unchanged == 1
        assert compare(in_bucket, EARLY) == ()
        theirs = engine(
            lake,
            **{
                "s3.endpoint": environment["AWS_ENDPOINT_URL"],
                "s3.access-key-id": "somebody",
                "s3.secret-access-key": "secret",
                "s3.region": "us-east-1",
            },
        )
        found = theirs.load_table("outbox.events").scan().to_arrow()
        assert found["aggregate_id"].to_pylist() == [str(EARLY)]


def test_a_catalog_by_its_name(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against catalogs of other kinds that cannot be used, and against a name that leads nowhere."""
    archived(database, settings, EARLY)
    named = settings.model_copy(update={"iceberg": Secret("elsewhere")})
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/lake.db")
    # As a process of its own reads it.
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    with pytest.raises(SetupError, match="pyiceberg's configuration has no catalog elsewhere"):
        register(named)
    assert register(named.model_copy(update={"iceberg": Secret("lake")})).added == (EARLY,)


def test_what_is_missing(database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command that does nothing, or prints a stack, where something is not there."""
    archived(database, settings, EARLY)
    done = database.outbox("archive", "register", OUTBOX_ARCHIVE=settings.archive)
    assert done.exit_code == 2
    assert "no Iceberg catalog configured: set OUTBOX_ICEBERG to postgresql://" in done.stderr
    for name in [each for each in sys.modules if each.startswith("outbox_pipelines.days.iceberg.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("outbox_pipelines.days.iceberg.registered_days")
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(SetupError, match=r"is not installed: pip install 'outbox-pipelines\[iceberg\]'"):
        register(settings)


def test_the_command(database: Database, settings: Settings, lake: str) -> None:
    """Guards against an exit code that hides what another engine has changed."""
    given = {"OUTBOX_ARCHIVE": settings.archive, "OUTBOX_ICEBERG": lake}
    nothing = database.outbox("archive", "register", **given)
    assert (nothing.exit_code, nothing.stderr) == (
        1,
        "outbox: no day is archived: run `outbox archive day DAY`\n",
    )
    archived(database, settings, EARLY, DAY)
    verified = database.outbox("archive", "verify", str(DAY), **given)
    assert verified.exit_code == 1
    assert verified.stderr == (
        f"outbox: {DAY}: the Iceberg catalog has no table outbox.events: run `outbox archive register`\n"
    )
    done = database.outbox("archive", "register", **given)
    assert (done.exit_code, done.output) == (0, "outbox.events: 2 days added, 0 replaced, 0 unchanged\n")
    assert database.outbox("archive", "verify", str(DAY), **given).exit_code == 0
    again = database.outbox("archive", "day", str(DAY), "--again", **given)
    assert again.stdout.endswith("the Iceberg table has the former file: run `outbox archive register`\n")
    assert database.outbox("archive", "register", **given).exit_code == 0
    table(lake).delete(f"aggregate_id = '{EARLY}'")
    done = database.outbox("archive", "register", "--json", **given)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"outbox: {EARLY}: another engine has removed events-")
    assert '"unchanged": 1' in done.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("https://catalog/", "such as postgresql://user@host/db, or the name of a catalog"),
        ("postgresql+psycopg://host/db", "write the database of an Iceberg catalog"),
        ("postgresql://u:p@ss@host/db", "has a password that contains @"),
        ("a name", "is not a connection string"),
    ],
)
def test_a_setting_that_is_wrong(given: str, said: str) -> None:
    """Guards against a mistake that a run finds at night, and a password in its message."""
    with pytest.raises(SetupError, match=said) as raised:
        load_settings(iceberg=given)
    assert "p@ss" not in str(raised.value)


@pytest.mark.parametrize(
    ("place", "root"),
    [
        ("/a b/../c/", "file:///c"),
        ("file:///c", "file:///c"),
        ("s3://bucket/a/", "s3://bucket/a"),
        ("s3://bucket", "s3://bucket"),
        ("az://container/a/", "abfss://container@account.dfs.core.windows.net/a"),
    ],
)
def test_a_place_has_one_spelling(place: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rows that are doubled, because Iceberg compares the texts of locations."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert root_of(Store(place)) == root


def test_only_metadata_is_written_and_deleted(tmp_path: Path) -> None:
    """Guards against a library that deletes an archived file, or writes beside the archive's own."""
    files = ArchiveIO({"outbox.store": str(tmp_path), "outbox.readers": "owner"})
    for name in ("events/event_date=2026-03-01/events.parquet", "_outbox/iceberg/../archive.json"):
        for call in (files.delete, files.new_output):
            with pytest.raises(SetupError, match=r"is not below .*/_outbox/iceberg, where"):
                call(f"file://{tmp_path}/{name}")


def test_a_path_that_readers_do_not_find(database: Database, settings: Settings, tmp_path: Path) -> None:
    """Guards against a location that some engines cut at a character."""
    odd = settings.model_copy(update={"archive": str(tmp_path / "50%")})
    archived(database, odd, EARLY)
    with pytest.raises(SetupError, match="contains %: readers of Iceberg do not find such files"):
        register(odd)
    assert directory(odd, EARLY).exists()
