"""`archive.day.archive`: the file and the manifest of a day."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from outbox_pipelines import __version__
from outbox_pipelines.days.archive import archive_sql, export, identity
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive.manifest import SCHEMA, Manifest, digest
from outbox_pipelines.days.partitions.calendar import working_at
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import Settings
from tests.conftest import wait_until
from tests.days.archive.days import (
    SHAPES,
    days_ago,
    directory,
    edit_manifest,
    file,
    make_days,
    manifest,
    manifest_path,
    names,
    past_day,
    publish,
    rows,
    write,
    write_many,
    write_shapes,
    writing,
)
from tests.schema.servers import Database

OF_TABLE = """
SELECT id::text, seq, aggregate_type, aggregate_id, event_type, payload::text, headers::text, idempotency_key,
       correlation_id, causation_id, traceparent, version, created_at
FROM outbox WHERE created_at >= %s AND created_at < %s + 1
ORDER BY aggregate_type COLLATE "C", aggregate_id COLLATE "C", seq"""
ENDS = "SELECT count(*), min(seq), max(seq), min(created_at), max(created_at) FROM outbox"
STATE = """
SELECT state, events, manifest_sha256, archived_at IS NOT NULL, proven_at FROM outbox_days WHERE day = %s"""
END_EXPORT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND query ~ 'LEFT JOIN outbox_released' AND pid <> pg_backend_pid()"""


@pytest.mark.extended
def test_more_types_than_characters(database: Database, settings: Settings) -> None:
    """Guards against a day that can never be archived, and so never dropped."""
    day = days_ago(2)
    make_days(database, day)
    with writing(database) as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
            "SELECT 'tenant-' || n, 'a', 'e', '{}', %s::date + interval '1 hour' "
            "FROM generate_series(1, 56000) n",
            [day],
        )
    publish(database)
    assert days.archive(settings, day).written
    assert days.verify(settings, day).equal
    found = [row["aggregate_type"] for row in rows(settings, day)]
    assert (len(found), found) == (56_000, sorted(found))


def ends(said: Manifest) -> tuple[Any, ...]:
    """What the manifest reports about all rows."""
    return said.rows, said.first_seq, said.last_seq, said.first_created_at, said.last_created_at


@pytest.mark.parametrize("most_types", [1000, 4])
def test_the_file_holds_exactly_the_rows(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch, most_types: int
) -> None:
    """Guards against a value that changes in the file, a row too few or too many, and another order."""
    monkeypatch.setattr(archive_sql, "MOST_TYPES", most_types)
    day = past_day(database)
    with database.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        table = connection.execute(OF_TABLE, [day, day]).fetchall()
    assert len(table) == len(SHAPES) + 2
    assert days.archive(settings, day).written
    found = rows(settings, day)
    assert [tuple(row.values())[:13] for row in found] == table
    assert {row["status"] for row in found} == {"PROCESSED"}
    assert {row["attempts"] for row in found} == {0}
    assert {row["last_error"] for row in found} == {None}
    with file(settings, day).open("rb") as stream:
        assert pq.read_schema(stream).equals(SCHEMA, check_metadata=False)


def test_the_manifest_tells_the_truth(database: Database, settings: Settings) -> None:
    """Guards against figures that are compared by no check, until a user relies on them."""
    day = past_day(database)
    with database.connect() as connection:
        connection.execute(
            "INSERT INTO outbox_parked SELECT o.*, 'failed', 3, NULL, 'large' FROM outbox o LIMIT 1"
        )
    before = datetime.now(UTC).replace(microsecond=0)
    said = days.archive(settings, day).manifest
    assert manifest(settings, day) == said
    content = file(settings, day).read_bytes()
    assert names(settings, day) == [said.file]
    assert (said.size, said.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert said.file == f"events-{said.sha256[:16]}.parquet"
    assert database.rows(ENDS) == [ends(said)]
    assert said.statuses == {"PROCESSED": said.rows - 1, "FAILED": 1}
    assert sum(bucket.rows for bucket in said.buckets.values()) == said.rows
    assert (said.schema_version, said.tool) == (1, f"outbox-pipelines {__version__}")
    assert before <= said.written_at <= datetime.now(UTC)
    source = "SELECT system_identifier, current_database(), current_schema() FROM pg_control_system()"
    assert database.rows(source) == [
        (said.source.system_identifier, said.source.database, said.source.schema_)
    ]
    stored = manifest_path(settings, day).read_bytes()
    assert database.rows(STATE, day) == [("archived", said.rows, digest(stored), True, None)]


def test_a_row_group_is_bounded_in_bytes(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against memory that grows with the payloads: a group is what writer and readers hold."""
    monkeypatch.setattr(export, "_BATCH_BYTES", 30_000)
    monkeypatch.setattr(export, "_GROUP_BYTES", 100_000)
    day = days_ago(3)
    make_days(database, day)
    write_many(database, day, 5000)
    publish(database)
    days.archive(settings, day)
    with file(settings, day).open("rb") as stream:
        found = pq.read_metadata(stream)
        assert found.num_row_groups > 5
        assert max(found.row_group(n).total_byte_size for n in range(found.num_row_groups)) < 200_000


def test_the_rows_are_sorted_over_batches_and_row_groups(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows lost or duplicated between two batches or groups, and unreported progress."""
    monkeypatch.setattr(export, "_BATCH_BYTES", 30_000)
    monkeypatch.setattr(export, "GROUP_ROWS", 700)
    monkeypatch.setattr(export, "_PROGRESS_ROWS", 1000)
    day = days_ago(3)
    make_days(database, day)
    write_many(database, day, 5000)
    write_shapes(database, day)
    publish(database)
    shown: list[int] = []
    said = days.archive(settings, day, progress=shown.append).manifest
    found = rows(settings, day)
    order = [(row["aggregate_type"], row["aggregate_id"], row["seq"]) for row in found]
    assert order == sorted(order)
    assert {row["id"] for row in found} == {id for (id,) in database.rows("SELECT id::text FROM outbox")}
    assert len(found) == said.rows == 5000 + len(SHAPES) + 2
    assert database.rows(ENDS) == [ends(said)]
    assert [rows // 1000 for rows in shown] == [1, 2, 3, 4, 5]
    with file(settings, day).open("rb") as stream:
        groups = pq.read_metadata(stream)
        assert groups.num_row_groups > 5
        assert max(groups.row_group(n).num_rows for n in range(groups.num_row_groups)) <= 700
    assert days.verify(settings, day).equal


def test_an_empty_day(database: Database, settings: Settings) -> None:
    """Guards against a day without events that stays open permanently, or has no file to be read."""
    day = days_ago(3)
    make_days(database, day)
    said = days.archive(settings, day).manifest
    assert (said.rows, said.first_seq, said.last_created_at, said.statuses, said.buckets) == (
        0,
        None,
        None,
        {},
        {},
    )
    assert rows(settings, day) == []
    assert days.verify(settings, day).equal
    assert not days.archive(settings, day).written


def test_archived_twice_is_left_as_it_is(database: Database, settings: Settings) -> None:
    """Guards against a second run that replaces what is proven already."""
    day = past_day(database)
    days.archive(settings, day)
    days.verify(settings, day)
    kept = database.rows("SELECT * FROM outbox_days WHERE day = %s", day)
    first = file(settings, day).stat().st_mtime_ns
    again = days.archive(settings, day)
    assert (again.written, again.manifest) == (False, manifest(settings, day))
    assert file(settings, day).stat().st_mtime_ns == first
    assert database.rows("SELECT * FROM outbox_days WHERE day = %s", day) == kept


def test_again_takes_the_place_of_the_old_file(database: Database, settings: Settings) -> None:
    """Guards against two files of one day: who reads the directory counts every event twice."""
    day = past_day(database)
    old = days.archive(settings, day).manifest
    days.verify(settings, day)
    # What became of an event has changed since.
    database.rows("INSERT INTO outbox_parked SELECT o.*, 'discarded', 3, NULL, 'large' FROM outbox o LIMIT 1")
    new = days.archive(settings, day, again=True)
    assert new.written
    assert new.manifest.file != old.file
    assert names(settings, day) == [new.manifest.file]
    # It is another file, and not proven yet.
    assert database.rows(STATE, day)[0][4] is None
    assert days.verify(settings, day).equal


def test_a_day_that_is_not_ready_says_why_and_what_helps(database: Database, settings: Settings) -> None:
    """Guards against an archive of a day that still changes, and a refusal that leaves its reader alone."""
    today = datetime.now(UTC).date()
    with pytest.raises(NotReadyError, match=f"{today} is not closed: it ends at midnight UTC"):
        days.archive(settings, today)
    day = days_ago(3)
    make_days(database, day)
    write(database, day)
    with pytest.raises(NotReadyError, match="shard 0 has not published 1 of its events: see `outbox status`"):
        days.archive(settings, day)
    with pytest.raises(
        SetupError, match="2020-01-01 is not a day of the outbox: see `outbox partitions list`"
    ):
        days.archive(settings, day.replace(year=2020, month=1, day=1))
    with pytest.raises(NotReadyError, match=f"{day} is open, not archived: run `outbox archive day {day}`"):
        days.verify(settings, day)
    assert not directory(settings, day).exists()


def test_a_dropped_day_is_not_archived_again(database: Database, settings: Settings) -> None:
    """Guards against an empty file in place of the only copy."""
    day = past_day(database)
    days.archive(settings, day)
    database.rows(f"DROP TABLE outbox_{day:%Y%m%d}")
    database.rows("UPDATE outbox_days SET state = 'dropped' WHERE day = %s", day)
    with pytest.raises(NotReadyError, match=f"{day} is dropped: .*; check it with `outbox archive verify"):
        days.archive(settings, day, again=True)
    left = days.archive(settings, day)
    assert (left.written, left.manifest) == (False, manifest(settings, day))
    assert days.verify(settings, day).equal
    manifest_path(settings, day).unlink()
    with pytest.raises(NotReadyError, match="restore its manifest in"):
        days.archive(settings, day)
    database.rows("UPDATE outbox_days SET manifest_sha256 = NULL, archive = NULL WHERE day = %s", day)
    with pytest.raises(NotReadyError, match=f"{day} was dropped without an archive"):
        days.archive(settings, day)


SLOW = """
import sys
from datetime import date
from outbox_pipelines.days.archive import day, export
from outbox_pipelines.settings import load_settings
export._PROGRESS_ROWS = 1000
export._BATCH_BYTES = 30_000
def halt(rows):
    print(rows, flush=True)
    sys.stdin.read()
day.archive(load_settings(), date.fromisoformat(sys.argv[1]), progress=halt)
"""


def test_a_process_that_crashes_leaves_nothing_that_counts(database: Database, settings: Settings) -> None:
    """Guards against half a file that is taken for a day, and against leftovers of crashed processes."""
    day = days_ago(3)
    make_days(database, day)
    write_many(database, day, 5000)
    publish(database)
    environment = os.environ | {"OUTBOX_DSN": settings.dsn, "OUTBOX_ARCHIVE": settings.archive}
    running = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(day)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline().strip().isdigit()
    assert list(Path(settings.archive).glob(f"_outbox/writing/{day}-*/*"))
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert names(settings, day) == []
    assert database.rows(STATE, day)[0][:3] == ("closed", None, None)
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = "
    held += "(SELECT oid FROM pg_database WHERE datname = current_database())"
    wait_until(lambda: database.value(held) == 0, what="the server to notice the death")
    said = days.archive(settings, day).manifest
    assert names(settings, day) == [said.file]
    assert not list(Path(settings.archive).glob("_outbox/writing/*"))
    assert days.verify(settings, day).equal


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file of this process may grow larger: the kernel refuses, and Python has it say so by an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_no_file(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a stack trace, a valid file with half the rows, and a thread that never ends."""
    monkeypatch.setattr(export, "_BATCH_BYTES", 30_000)
    monkeypatch.setattr(export, "GROUP_ROWS", 500)
    day = days_ago(3)
    make_days(database, day)
    write_many(database, day, 5000)
    publish(database)
    with disk_of(10_000), pytest.raises(UnavailableError, match="File too large"):
        days.archive(settings, day)
    assert names(settings, day) == []
    assert "outbox archive" not in {thread.name for thread in threading.enumerate()}
    assert days.archive(settings, day).written


def test_a_disk_that_is_full_at_the_end(database: Database, settings: Settings) -> None:
    """Guards against a file that is replaced by one without its last bytes."""
    day = past_day(database)
    kept = days.archive(settings, day).manifest
    with disk_of(kept.size - 10), pytest.raises(UnavailableError, match="File too large"):
        days.archive(settings, day, again=True)
    assert manifest(settings, day) == kept
    assert names(settings, day) == [kept.file]
    assert days.verify(settings, day).equal


def test_a_database_that_goes_away_leaves_no_file(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a stack trace of a driver, and half a file, when the server ends the export."""
    monkeypatch.setattr(export, "_BATCH_BYTES", 30_000)
    monkeypatch.setattr(export, "_PROGRESS_ROWS", 1000)
    day = days_ago(3)
    make_days(database, day)
    # More than lies in the buffers between server and client.
    write_many(database, day, 100_000)
    publish(database)
    ended: list[int] = []

    def end(rows: int) -> None:
        if not ended:
            ended.append(rows)
            assert database.value(END_EXPORT)

    with pytest.raises(UnavailableError, match="ended the export"):
        days.archive(settings, day, progress=end)
    assert ended
    assert names(settings, day) == []


def test_a_run_that_crashed_before_the_database_knew(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a manifest that does not count, and a day that is written again for nothing."""
    day = past_day(database)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(days, "_record", die)
        with pytest.raises(KeyboardInterrupt):
            days.archive(settings, day)
    written = manifest(settings, day)
    assert database.rows(STATE, day)[0][:3] == ("closed", None, None)
    adopted = days.archive(settings, day)
    assert (adopted.written, adopted.manifest) == (False, written)
    assert database.rows(STATE, day)[0][:2] == ("archived", written.rows)
    assert days.verify(settings, day).equal


@pytest.mark.parametrize("damage", ["edited", "gone"])
def test_a_manifest_that_the_database_does_not_know(
    database: Database, settings: Settings, damage: str
) -> None:
    """Guards against foreign figures that are adopted, and a good file replaced without a request."""
    day = past_day(database)
    truth = days.archive(settings, day).manifest
    if damage == "edited":
        edit_manifest(settings, day, statuses={"DISCARDED": truth.rows})
    else:
        manifest_path(settings, day).unlink()
    with pytest.raises(SetupError, match=f"`outbox archive day {day} --again`"):
        days.archive(settings, day)
    assert names(settings, day) == [truth.file]
    assert days.archive(settings, day, again=True).written
    assert manifest(settings, day).statuses == truth.statuses
    assert days.verify(settings, day).equal


@pytest.mark.parametrize("damage", ["edited", "gone"])
def test_a_file_that_has_more_than_the_rows_is_never_lost(
    database: Database, settings: Settings, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Guards against a row that is deleted past the guards, and with it the only copy of it."""
    day = past_day(database)
    truth = days.archive(settings, day).manifest
    content = file(settings, day).read_bytes()
    database.rows("ALTER TABLE outbox DISABLE TRIGGER outbox_append_only")
    database.rows("DELETE FROM outbox WHERE seq = (SELECT min(seq) FROM outbox)")
    database.rows("ALTER TABLE outbox ENABLE TRIGGER outbox_append_only")
    path = manifest_path(settings, day)
    if damage == "edited":
        path.write_bytes(path.read_bytes() + b" ")
    else:
        path.unlink()
    with pytest.raises(SetupError, match="since it was written: find out why"):
        days.archive(settings, day)
    assert names(settings, day) == [truth.file]
    for _ in range(2):
        days.archive(settings, day, again=True)
        (kept,) = Path(settings.archive).rglob("*.kept")
        assert kept.name == f"{truth.file}.kept"
        assert kept.read_bytes() == content
        assert str(kept) in caplog.text
        assert kept.with_name(f"{kept.name}.json").exists() == (damage == "edited")
        assert names(settings, day) == [manifest(settings, day).file]
    assert days.verify(settings, day).equal


def test_a_damaged_file_is_kept(database: Database, settings: Settings) -> None:
    """Guards against a repairable file that is removed by its replacement."""
    day = past_day(database)
    days.archive(settings, day)
    path = file(settings, day)
    path.write_bytes(path.read_bytes()[:-1])
    database.rows("INSERT INTO outbox_parked SELECT o.*, 'failed', 3, NULL, 'large' FROM outbox o LIMIT 1")
    days.archive(settings, day, again=True)
    (kept,) = Path(settings.archive).rglob("*.kept")
    assert kept.name == f"{path.name}.kept"


def test_an_archive_of_another_outbox_is_left_alone(database: Database, settings: Settings) -> None:
    """Guards against staging that overwrites the days of production."""
    day = past_day(database)
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA other")
    other = Database(database.dsn, database.bin_dir, "other")
    other.outbox("migrate")
    make_days(other, day)
    write(other, day, [{"payload": psycopg.types.json.Jsonb("ours")}])
    publish(other)
    theirs = days.archive(other.settings.model_copy(update={"archive": settings.archive}), day).manifest
    for again in (False, True):
        with pytest.raises(SetupError, match=r"archive of another outbox, schema other of .*choose another"):
            days.archive(settings, day, again=again)
    # `force` states that this database was restored from the other one: its rows are compared nevertheless.
    identity.adopt(settings, force=True)
    with pytest.raises(
        SetupError, match=r"has other events of .*, of schema other of .*choose another location"
    ):
        days.archive(settings, day)
    assert manifest(settings, day) == theirs
    assert names(settings, day) == [theirs.file]
    assert days.archive(settings, day, again=True).written
    assert days.verify(settings, day).equal


@pytest.mark.extended
def test_two_at_once_on_one_day(database: Database, settings: Settings) -> None:
    """Guards against two processes that write one file, and against an unexplained wait."""
    day = past_day(database)
    with working_at(settings, day):
        refused = database.outbox("archive", "day", str(day), OUTBOX_ARCHIVE=settings.archive)
        assert refused.exit_code == 1
        assert re.fullmatch(
            rf"outbox: {day} is being archived, proven, dropped or swept by session \d+ of role \w+ "
            rf"\(outbox: {day}\), since .* UTC: wait until it ends\n",
            refused.output,
        )
        # Not its neighbour.
        with working_at(settings, days_ago(4)):
            pass
    assert days.archive(settings, day).written


def test_two_outboxes_of_one_database_do_not_wait_for_each_other(
    database: Database, settings: Settings
) -> None:
    """Guards against jobs of two schemas that refuse each other every night."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA other")
    other = Database(database.dsn, database.bin_dir, "other")
    other.outbox("migrate")
    with working_at(settings, days_ago(3)), working_at(other.settings, days_ago(3)):
        pass


def test_no_archive_is_named(database: Database) -> None:
    """Guards against a day archived into the current working directory."""
    for archive in ("", "none"):
        with pytest.raises(SetupError, match="set OUTBOX_ARCHIVE to a directory"):
            days.archive(database.settings.model_copy(update={"archive": archive}), days_ago(3))
    assert not Path("none").exists()
