"""Where the archive lies: a directory and a bucket, with the same promises."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from outbox_pipelines.config.types import Readers
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive.store import Store, key, manifest_key
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.settings import load_settings
from tests.days.archive import buckets
from tests.days.archive.days import past_day
from tests.schema.servers import Database

DAY = date(2026, 3, 1)
NAME = manifest_key(DAY)
FILE = "events-0123456789abcdef.parquet"
OLD = "events-fedcba9876543210.parquet"


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    with buckets.serving() as environment:
        yield environment


@pytest.fixture
def bucket(served: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of an empty bucket, which is ours now."""
    for name in buckets.names(served):
        buckets.client(served).delete_object(Bucket=buckets.BUCKET, Key=name)
    for name, value in served.items():
        monkeypatch.setenv(name, value)
    return served


@pytest.fixture(params=["directory", "file:", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty archive."""
    if request.param == "bucket":
        request.getfixturevalue("bucket")
        return Store(buckets.URL)
    directory = tmp_path / "an archive"
    return Store(f"file://{directory}" if request.param == "file:" else str(directory))


def put(store: Store, day: date, name: str, content: bytes) -> None:
    with store.workplace(day) as directory:
        file = directory / "work"
        file.write_bytes(content)
        store.adopt(file, key(day, name))
        assert not file.exists()


def test_a_day_in_a_directory_and_in_a_bucket(database: Database, store: Store) -> None:
    """Guards against an archive that only ever worked on one kind of place."""
    settings = database.settings.model_copy(update={"archive": store.url})
    day = past_day(database)
    said = days.archive(settings, day).manifest
    assert days.verify(settings, day).differences == ()
    assert store.days() == [day]
    assert not days.archive(settings, day).written
    database.rows("INSERT INTO outbox_parked SELECT o.*, 'failed', 3, NULL, 'large' FROM outbox o LIMIT 1")
    new = days.archive(settings, day, again=True).manifest
    assert new.file != said.file
    with pytest.raises(FileNotFoundError), store.local(key(day, said.file)):
        pass
    assert days.verify(settings, day).differences == ()


def test_keys_lie_under_the_path_of_the_url(bucket: dict[str, str]) -> None:
    """Guards against two outboxes of one bucket that meet at its root."""
    store = Store(buckets.URL)
    put(store, DAY, FILE, b"rows")
    store.write(NAME, b"{}", None)
    assert buckets.names(bucket) == [f"shop/days/{NAME}", f"shop/days/events/event_date={DAY}/{FILE}"]


def test_what_is_written_is_read(store: Store) -> None:
    """Guards against an object that is cut, and one that is not there taken for an error."""
    assert store.read(NAME) is None
    assert store.days() == []
    # In several parts, where a bucket takes those.
    content = os.urandom(12_000_000)
    put(store, DAY, FILE, content)
    with store.local(key(DAY, FILE)) as path:
        assert path.read_bytes() == content
    with pytest.raises(FileNotFoundError), store.local(key(DAY, OLD)):
        pass
    # A file without a manifest does not count.
    assert store.days() == []
    store.write(NAME, b"{}", None)
    found = store.read(NAME)
    assert found is not None
    assert found.content == b"{}"
    assert store.days() == [DAY]


def test_one_of_two_writers_is_refused(store: Store) -> None:
    """Guards against a manifest that is replaced by a writer that has not seen it."""
    with store.workplace(DAY):
        pass
    store.write(NAME, b"first", None)
    with pytest.raises(
        SetupError, match="written by another process at the same time: run the command again"
    ):
        store.write(NAME, b"second", None)
    seen = store.read(NAME)
    store.write(NAME, b"third", seen)
    with pytest.raises(SetupError, match="written by another process"):
        store.write(NAME, b"fourth", seen)
    found = store.read(NAME)
    assert found is not None
    assert found.content == b"third"


def test_what_lies_beside_is_found(store: Store) -> None:
    """Guards against a file of before that a reader of the whole directory counts, and against a zeal
    that removes what is not ours."""
    put(store, DAY, FILE, b"new")
    put(store, DAY, OLD, b"old")
    put(store, DAY, "events.parquet", b"somebody's")
    other = date(2026, 3, 2)
    put(store, other, OLD, b"another day's")
    if store.root is not None:
        left = store.root / f"_outbox/writing/{DAY}-dead"
        left.mkdir()
        (left / "events.parquet").write_bytes(b"half")
    assert store.others(DAY, FILE) == [key(DAY, OLD)]
    kept = store.set_aside(DAY, key(DAY, OLD))
    with store.local(kept) as path:
        assert path.read_bytes() == b"old"
    put(store, DAY, OLD, b"old")
    store.remove(key(DAY, OLD))
    store.clear(DAY)
    for day, name in ((DAY, FILE), (DAY, "events.parquet"), (other, OLD)):
        with store.local(key(day, name)):
            pass
    with pytest.raises(FileNotFoundError), store.local(key(DAY, OLD)):
        pass
    assert store.root is None or not left.exists()


def test_other_things_in_the_archive(store: Store) -> None:
    """Guards against a stack trace because of a directory that a user made."""
    store.write(NAME, b"{}", None)
    if store.root is None:
        pytest.skip("a bucket has no directories")
    for name in ("event_date=yesterday", "notes", "event_date=2026-03-02", "event_date=2026-13-45"):
        (store.root / "events" / name).mkdir(parents=True)
    (store.root / "README").write_text("")
    for name in ("README", "2026-13-45.json", "2026-W10-1.json", "20260302.json", "2026-03-03.json.old"):
        (store.root / NAME).with_name(name).write_text("{}")
    assert store.days() == [DAY]


def test_a_file_is_complete_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a name that a power cut leaves without its content."""
    store = Store(str(tmp_path))
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    replace = Path.replace

    def watched(path: Path, target: Path) -> Path:
        synced.append(f"-> {target.name}")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    put(store, DAY, FILE, b"rows")
    directory = f"event_date={DAY}"
    assert synced[-3:] == ["work", f"-> {FILE}", directory]
    store.write(NAME, b"{}", None)
    assert synced[-3:] == ["object", f"-> {DAY}.json", "manifests"]
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [NAME, key(DAY, FILE)]


@pytest.mark.parametrize(
    ("readers", "modes"), [("owner", (0o600, 0o700)), ("group", (0o640, 0o750)), ("everyone", (0o644, 0o755))]
)
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_who_may_read_the_files(tmp_path: Path, readers: Readers, modes: tuple[int, int], umask: int) -> None:
    """Guards against events that everybody with a login reads, and an archive that analysts cannot."""
    store = Store(str(tmp_path / "archive"), readers)
    before = os.umask(umask)
    try:
        put(store, DAY, FILE, b"events")
    finally:
        os.umask(before)
    file = tmp_path / "archive" / key(DAY, FILE)
    found = [each.stat().st_mode & 0o777 for each in (file, file.parent, tmp_path / "archive")]
    assert found == [modes[0], modes[1], modes[1]]


def test_the_group_of_a_directory_is_that_of_all_in_it(tmp_path: Path) -> None:
    """Guards against analysts who may read the files of another group, which they do not belong to."""
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 1)
    tmp_path.chmod(0o2750)
    store = Store(str(tmp_path), "group")
    put(store, DAY, FILE, b"events")
    store.write(NAME, b"{}", None)
    found = [*tmp_path.rglob("*")]
    assert len(found) > 5
    assert {each.stat().st_gid for each in found} == {tmp_path.stat().st_gid}
    assert all(each.stat().st_mode & stat.S_ISGID for each in found if each.is_dir())


def refused(database: Database, day: date, archive: str) -> str:
    """What the command says, in one line and with the exit code of a set-up that is not right."""
    query = "SELECT archived_at, proven_at, manifest_sha256 FROM outbox_days"
    before = database.rows(query)
    done = database.outbox("archive", "day", str(day), OUTBOX_ARCHIVE=archive)
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "OUTBOX_ARCHIVE" in done.stderr
    assert database.rows(query) == before
    return done.stderr


def test_a_directory_that_cannot_be_written(database: Database, tmp_path: Path) -> None:
    """Guards against a stack trace for a disk that is not mounted, or not ours."""
    day = past_day(database)
    taken = tmp_path / "file"
    taken.write_text("")
    assert "Not a directory" in refused(database, day, str(taken))
    # For every user, including root: no directory can be made there.
    assert "/proc/archive" in refused(database, day, "/proc/archive")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: run it as another user")
def test_a_directory_of_another_user(database: Database, tmp_path: Path) -> None:
    """Guards against a stack trace for a directory without write permission."""
    day = past_day(database)
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(database, day, str(tmp_path))


def test_a_bucket_that_is_not_there(database: Database, bucket: dict[str, str]) -> None:
    """Guards against a missing bucket that passes for an empty archive."""
    day = past_day(database)
    assert "The specified bucket does not exist" in refused(database, day, "s3://no-such-bucket/days")
    with pytest.raises(UnavailableError, match="does not exist"), Store("s3://no-such-bucket").local(NAME):
        pass
    with pytest.raises(UnavailableError, match="does not exist"):
        Store("s3://no-such-bucket").days()


def test_wrong_credentials(database: Database, bucket: dict[str, str]) -> None:
    """Guards against a stack trace, or an archive that seems empty, where a key has run out."""
    day = past_day(database)
    settings = load_settings(dsn=database.dsn, archive=buckets.URL)
    days.archive(settings, day)
    with buckets.strict(bucket):
        assert "does not exist in our records" in refused(database, day, buckets.URL + "/elsewhere")
        verified = database.outbox("archive", "verify", str(day), OUTBOX_ARCHIVE=buckets.URL)
    assert (verified.exit_code, len(verified.stderr.splitlines())) == (2, 1)
    # An archive that cannot be read proves nothing, and refutes nothing.
    assert (
        json.loads(
            database.outbox("archive", "verify", str(day), "--json", OUTBOX_ARCHIVE=buckets.URL).output
        )["differences"]
        == []
    )


@pytest.mark.parametrize("url", ["s3://", "az://container/path"])
def test_a_url_that_leads_nowhere(database: Database, url: str) -> None:
    """Guards against a stack trace for a slip in a setting."""
    refused(database, past_day(database), url)


def test_an_unknown_scheme(database: Database) -> None:
    """Guards against a directory called ftp:."""
    done = database.outbox("archive", "day", "2026-01-01", OUTBOX_ARCHIVE="ftp://there/archive")
    assert done.exit_code == 2
    assert "write a directory, or s3://bucket/path" in done.stderr
