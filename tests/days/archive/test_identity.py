"""Which archive an outbox has: one that is not mounted, or another outbox's, is refused."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import psycopg
import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop, identity
from outbox_pipelines.days.archive.store import IDENTITY
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import Settings
from tests.days.archive.days import days_ago, make_days, past_day, publish, write
from tests.schema.servers import Database

FIRST, SECOND = days_ago(4), days_ago(3)
UNMOUNTED = r"has no archive .*this outbox has 1 archived day: mount the disk"


@pytest.fixture
def archived(database: Database, settings: Settings) -> Settings:
    """Two days that are over, the first of them archived."""
    make_days(database, FIRST)
    for day in (FIRST, SECOND):
        write(database, day, [{}, {}])
    publish(database)
    days.archive(settings, FIRST)
    return settings


def unmount(settings: Settings) -> Path:
    """The archive as a disk that is not there: an empty directory is in its place."""
    root = Path(settings.archive)
    root.rename(root.with_name("disk"))
    root.mkdir()
    return root


def another(database: Database, archive: str) -> Database:
    """A second outbox of the database, with the same days."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA other")
    other = Database(database.dsn, database.bin_dir, "other")
    assert other.outbox("migrate").exit_code == 0
    make_days(other, FIRST)
    for day in (FIRST, SECOND):
        write(other, day, [{"aggregate_type": "other"}])
    publish(other)
    return other


def test_an_archive_that_is_not_mounted_is_not_made_again(database: Database, archived: Settings) -> None:
    """Guards against days that are written below a mount point, and dropped although their files are lost."""
    root = unmount(archived)
    for again in (False, True):
        with pytest.raises(SetupError, match=UNMOUNTED):
            days.archive(archived, SECOND, again=again)
        with pytest.raises(SetupError, match=UNMOUNTED):
            days.archive(archived, FIRST, again=again)
    with pytest.raises(SetupError, match=UNMOUNTED):
        days.verify(archived, FIRST)
    with pytest.raises(SetupError, match=UNMOUNTED):
        drop.drop(archived, FIRST)
    assert list(root.iterdir()) == []
    shown = database.outbox("archive", "day", str(SECOND), OUTBOX_ARCHIVE=archived.archive)
    assert shown.exit_code == 2
    assert len(shown.stderr.splitlines()) == 1
    root.rmdir()
    root.with_name("disk").rename(root)
    assert days.archive(archived, SECOND).written
    assert drop.drop(archived, FIRST).rows == 2
    # What is dropped is not proven by an empty directory either.
    unmount(archived)
    with pytest.raises(SetupError, match="has no archive"):
        days.verify(archived, FIRST)


def test_a_copy_of_everything_is_the_same_archive(archived: Settings, tmp_path: Path) -> None:
    """Guards against a move that needs more than a copy."""
    shutil.copytree(archived.archive, tmp_path / "moved")
    shutil.rmtree(archived.archive)
    moved = archived.model_copy(update={"archive": str(tmp_path / "moved")})
    assert days.verify(moved, FIRST).equal
    assert days.archive(moved, SECOND).written
    assert drop.drop(moved, FIRST).now


def test_a_move_without_the_identity_is_adopted(database: Database, archived: Settings) -> None:
    """Guards against a deliberate move that nothing resolves, and one that loses days in silence."""
    root = unmount(archived)
    with pytest.raises(NotReadyError, match=rf"lacks the manifests of 1 of 1 archived days, first {FIRST}"):
        identity.adopt(archived)
    assert list(root.iterdir()) == []
    shutil.copytree(root.with_name("disk"), root, dirs_exist_ok=True)
    (root / IDENTITY).unlink()
    shown = database.outbox("archive", "adopt", OUTBOX_ARCHIVE=archived.archive)
    assert (shown.exit_code, "it has 1 of its archived days" in shown.output) == (0, True)
    assert days.verify(archived, FIRST).equal
    assert days.archive(archived, SECOND).written
    # The disk of before is not the archive any more.
    old = archived.model_copy(update={"archive": str(root.with_name("disk"))})
    with pytest.raises(SetupError, match=r"has another archive.*this outbox has 2 archived days"):
        days.verify(old, FIRST)


def test_an_archive_is_begun_without_the_days_of_before(database: Database, archived: Settings) -> None:
    """Guards against an outbox that never archives again because a disk is lost."""
    unmount(archived)
    shown = database.outbox("archive", "adopt", "--force", OUTBOX_ARCHIVE=archived.archive)
    assert shown.exit_code == 0
    assert f"missing there: 1 archived day, first {FIRST}" in shown.stderr
    with pytest.raises(SetupError, match="is missing in"):
        days.archive(archived, FIRST)
    assert days.archive(archived, FIRST, again=True).written
    assert days.archive(archived, SECOND).written
    assert drop.drop(archived, FIRST).rows == 2


def test_another_outbox_is_refused(database: Database, archived: Settings) -> None:
    """Guards against two outboxes whose days are mixed in one archive for all its readers."""
    other = another(database, archived.archive)
    theirs = other.settings.model_copy(update={"archive": archived.archive})
    for day in (FIRST, SECOND):
        for again in (False, True):
            with pytest.raises(SetupError, match=r"archive of another outbox, schema public .*choose"):
                days.archive(theirs, day, again=again)
    with pytest.raises(SetupError, match="archive of another outbox"):
        identity.adopt(theirs)
    # `force` states that it was restored from the first: from then on the first is refused.
    identity.adopt(theirs, force=True)
    assert days.archive(theirs, SECOND).written
    with pytest.raises(SetupError, match=r"has another archive, of schema other"):
        days.archive(archived, SECOND)
    side_by_side = theirs.model_copy(update={"archive": f"{archived.archive}-2"})
    with pytest.raises(SetupError, match="has no archive"):
        days.archive(side_by_side, FIRST)


def test_a_role_that_is_not_the_owner(database: Database, archived: Settings) -> None:
    """Guards against a traceback where one word of SQL helps."""
    role = database.role()
    database.rows(f"SELECT outbox_grant_operator('{role}')")
    dsn = f"{database.dsn} user={role}"
    for arguments in (("archive", "adopt"), ("archive", "day", str(SECOND))):
        shown = database.outbox(*arguments, OUTBOX_DSN=dsn, OUTBOX_ARCHIVE=archived.archive)
        assert shown.exit_code == 2, shown.output
        assert "own" in shown.stderr
        assert len(shown.stderr.splitlines()) == 1


@pytest.mark.extended
def test_an_identity_that_cannot_be_read(archived: Settings) -> None:
    """Guards against a traceback, and a file that any outbox replaces."""
    path = Path(archived.archive) / IDENTITY
    content = path.read_bytes()
    for damaged in (b"", content[:-9], b"\xff\xfe", json.dumps({"archive": 1}).encode()):
        path.write_bytes(damaged)
        with pytest.raises(SetupError, match=r"archive.json cannot be read: .*outbox archive adopt"):
            days.archive(archived, SECOND)
        assert path.read_bytes() == damaged
    identity.adopt(archived)
    assert days.archive(archived, SECOND).written


def test_what_a_crash_left_of_an_identity_is_removed(database: Database, settings: Settings) -> None:
    """Guards against half of a file that is never removed."""
    left = Path(settings.archive) / "_outbox/writing/archive.json-dead"
    left.mkdir(parents=True)
    (left / "object").write_bytes(b"half")
    days.archive(settings, past_day(database))
    assert not left.exists()


def test_days_without_an_identity_are_not_taken_over(database: Database, settings: Settings) -> None:
    """Guards against another outbox's days, copied without the file that says whose they are."""
    day = past_day(database)
    days.archive(settings, day)
    (Path(settings.archive) / IDENTITY).unlink()
    database.rows(
        "UPDATE outbox_days SET archive = NULL, manifest_sha256 = NULL, state = 'closed' "
        "WHERE state = 'archived'"
    )
    with pytest.raises(SetupError, match=r"has archived days, but no _outbox/archive.json"):
        days.archive(settings, day)
    identity.adopt(settings)
    assert not days.archive(settings, day).written


def test_two_first_days_at_once_draw_one_identity(database: Database, settings: Settings) -> None:
    """Guards against a day whose archive is unknown a moment later."""
    make_days(database, FIRST)
    for day in (FIRST, SECOND):
        write(database, day, [{}])
    publish(database)
    threads = [threading.Thread(target=days.archive, args=(settings, day)) for day in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert database.value("SELECT count(DISTINCT archive) FROM outbox_days WHERE state = 'archived'") == 1
    assert database.value("SELECT count(*) FROM outbox_days WHERE state = 'archived'") == 2
    assert days.verify(settings, FIRST).equal
    assert days.verify(settings, SECOND).equal
