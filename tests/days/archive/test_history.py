"""`outbox archive history`: one aggregate, across table and archive."""

from __future__ import annotations

import json
from datetime import UTC, timedelta
from pathlib import Path

import pytest

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import store
from outbox_pipelines.days.archive.history import Happened, history
from outbox_pipelines.days.archive.manifest import read_manifest
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer import emit
from tests.days.archive.days import days_ago, make_days, manifest_path, publish, write
from tests.schema.servers import Database

MINE: dict[str, object] = {"aggregate_type": "order", "aggregate_id": "42"}
OTHER: dict[str, object] = {"aggregate_type": "order", "aggregate_id": "4"}
FIRST, SECOND = days_ago(5), days_ago(4)
DEAD = """
INSERT INTO outbox_parked SELECT o.*, 'failed', 3, NULL, 'too large', now(), now()
FROM outbox o WHERE seq = %s"""
FULL = {**MINE, "correlation_id": "c", "causation_id": "", "version": 3}


@pytest.fixture
def seqs(database: Database, settings: Settings) -> list[int]:
    """Of the aggregate's events: two in each of two archived days, one of today, beside others'."""
    make_days(database, FIRST, SECOND)
    written = [
        *write(database, FIRST, [MINE, OTHER, FULL])[::2],
        *write(database, SECOND, [OTHER, MINE, MINE])[1:],
    ]
    publish(database)
    for day in (FIRST, SECOND):
        days.archive(settings, day)
    with database.connect(autocommit=False) as connection:
        today = emit(connection, "order", 42, "order.paid", {"n": 1})
        emit(connection, "invoice", 42, "invoice.sent", {})
        connection.commit()
    return [*(each.seq for each in written), today.seq or 0]


def _drop(database: Database, settings: Settings, day: object) -> None:
    """As far as a reader is concerned."""
    database.rows(f"DROP TABLE outbox_{day:%Y%m%d}")
    database.rows("UPDATE outbox_days SET state = 'dropped' WHERE day = %s", day)


def _places(found: list[Happened]) -> list[str]:
    return [each.place for each in found]


def test_across_table_and_archive(database: Database, settings: Settings, seqs: list[int]) -> None:
    """Guards against events that are missing or doubled where a day is in both, and another order."""
    from_table = history(settings, "order", "42")
    assert [each.seq for each in from_table] == seqs
    assert _places(from_table) == ["table"] * 5
    assert [each.status for each in from_table] == ["PROCESSED"] * 4 + ["PENDING"]
    _drop(database, settings, FIRST)
    found = history(settings, "order", "42")
    assert [each.seq for each in found] == seqs
    assert _places(found) == ["archive"] * 2 + ["table"] * 3
    _drop(database, settings, SECOND)
    assert _places(history(settings, "order", "42")) == ["archive"] * 4 + ["table"]


def test_an_event_is_the_same_wherever_it_is_found(
    database: Database, settings: Settings, seqs: list[int]
) -> None:
    """Guards against payloads, times and NULLs that differ by where they are read."""
    (_, before, *_) = history(settings, "order", "42")
    assert (before.correlation_id, before.causation_id, before.version) == ("c", "", 3)
    assert before.created_at.utcoffset() == timedelta(0)
    assert before.published_at is not None
    assert before.created_at.astimezone(UTC).date() == FIRST
    _drop(database, settings, FIRST)
    (_, after, *_) = history(settings, "order", "42")
    same = [name for name in Happened.__dataclass_fields__ if name != "place"]
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]


def test_a_superseded_day_counts_once(database: Database, settings: Settings, seqs: list[int]) -> None:
    """Guards against the events of a day that was archived twice."""
    days.archive(settings, FIRST, again=True)
    _drop(database, settings, FIRST)
    assert [each.seq for each in history(settings, "order", "42")] == seqs


def test_days_that_only_the_archive_has(
    database: Database, settings: Settings, seqs: list[int], tmp_path: Path
) -> None:
    """Guards against part of a history that is taken for all of it."""
    _drop(database, settings, FIRST)
    for archive in ("", "none"):
        with pytest.raises(SetupError, match=f"{FIRST} is not in the table, only in the archive: set OUTB"):
            history(settings.model_copy(update={"archive": archive}), "order", "42")
    elsewhere = settings.model_copy(update={"archive": str(tmp_path / "elsewhere")})
    with pytest.raises(SetupError, match=f"{FIRST} is not in the table, and not in .*elsewhere"):
        history(elsewhere, "order", "42")
    assert not (tmp_path / "elsewhere").exists()
    manifest_path(settings, FIRST).unlink()
    with pytest.raises(SetupError, match=f"{FIRST} is not in the table, and not in "):
        history(settings, "order", "42")


@pytest.mark.parametrize("archive", ["", "none", "not-there"])
def test_without_an_archive(database: Database, tmp_path: Path, archive: str) -> None:
    """Guards against an outbox of a day, whose history cannot be shown before anything is archived."""
    database.rows("SELECT outbox_emit('order', '42', 'order.placed', '{}')")
    place = str(tmp_path / archive) if archive == "not-there" else archive
    (found,) = history(database.settings.model_copy(update={"archive": place}), "order", "42")
    assert (found.event_type, found.status, found.place) == ("order.placed", "PENDING", "table")


@pytest.mark.extended
@pytest.mark.parametrize("reader", ["owner", "analyst", "other"])
def test_what_became_of_dead_letters_of_a_dropped_day(
    database: Database, settings: Settings, reader: str
) -> None:
    """Guards against a dead letter that shows as FAILED after it was published or discarded, a claim about
    what the role may not read or the database no longer has, and a failure for want of a right."""
    make_days(database, FIRST)
    written = [each.seq for each in write(database, FIRST, [MINE] * 6)]
    kept, again, published, discarded, gone, _ = written
    publish(database)
    for seq in (kept, again, published, discarded, gone):
        database.rows(DEAD, seq)
    days.archive(settings, FIRST)
    _drop(database, settings, FIRST)
    for action, seqs in (("replay", [again, published]), ("discard", [discarded, gone])):
        database.rows("SELECT outbox_act(%s, %s, 'why', '{}', 'me')", action, seqs)
    database.rows("SELECT outbox_release(%s)", [published])
    # As the purge does after the retention.
    database.rows("DELETE FROM outbox_parked WHERE seq = %s", gone)
    as_reader = settings
    if reader != "owner":
        role = database.role()
        database.rows(f"SELECT outbox_grant_analyst('{role}')")
        if reader == "other":
            database.rows(f"REVOKE SELECT (state) ON outbox_parked FROM {role}")
        as_reader = settings.model_copy(update={"dsn": f"{database.dsn} user={role}"})
    found = {each.seq: each for each in history(as_reader, "order", "42")}
    assert [found[seq].status for seq in written] == (
        ["FAILED", "PENDING", "PROCESSED", "DISCARDED", "RESOLVED", "PROCESSED"]
        if reader != "other"
        else ["UNKNOWN"] * 5 + ["PROCESSED"]
    )
    assert (found[published].published_at is None) is (reader == "other")
    done = database.outbox(
        *("archive", "history", "order", "42"),
        OUTBOX_ARCHIVE=settings.archive,
        OUTBOX_DSN=as_reader.dsn.reveal(),
    )
    assert done.exit_code == 0
    explained = (
        "UNKNOWN: a dead letter when its day" if reader == "other" else "RESOLVED: a dead letter that was"
    )
    assert (done.stderr.count("\n"), explained in done.stderr) == (1, True)


def test_a_dead_letter_of_another_database(database: Database, settings: Settings) -> None:
    """Guards against a day of which this database knows nothing: none of its events was parked here."""
    make_days(database, FIRST)
    (written,) = write(database, FIRST, [MINE])
    publish(database)
    database.rows(DEAD, written.seq)
    days.archive(settings, FIRST)
    database.rows(f"DROP TABLE outbox_{FIRST:%Y%m%d}")
    database.rows("DELETE FROM outbox_days WHERE day = %s", FIRST)
    database.rows("DELETE FROM outbox_parked")
    (found,) = history(settings, "order", "42")
    assert found.status == "UNKNOWN"


def test_the_command(database: Database, settings: Settings, seqs: list[int]) -> None:
    """Guards against a table that says less than the question, and JSON that leaves columns out."""
    _drop(database, settings, FIRST)
    done = database.outbox("archive", "history", "order", "42", OUTBOX_ARCHIVE=settings.archive)
    assert done.exit_code == 0
    head, _, first, *_, last = done.stdout.splitlines()
    assert head.split() == ["seq", "created_at", "(UTC)", "event_type", "status", "in", "payload"]
    assert first.split()[:2] == [str(seqs[0]), str(FIRST)]
    assert first.split()[4:6] == ["PROCESSED", "archive"]
    assert last.split()[3:] == ["order.paid", "PENDING", "table", '{"n":', "1}"]
    done = database.outbox("archive", "history", "order", "42", "--json", OUTBOX_ARCHIVE=settings.archive)
    found = json.loads(done.stdout)
    assert [each["seq"] for each in found] == seqs
    assert found[1]["correlation_id"] == "c"
    assert [each["place"] for each in found] == ["archive"] * 2 + ["table"] * 3


def test_a_changed_file(database: Database, settings: Settings, seqs: list[int]) -> None:
    """Guards against a file or manifest with other events, of the same size, that counts as verified."""
    _drop(database, settings, FIRST)
    asked = ("archive", "history", "order", "42", "--verify")
    assert database.outbox(*asked, OUTBOX_ARCHIVE=settings.archive).exit_code == 0
    manifest = manifest_path(settings, FIRST)
    file = Path(settings.archive, store.key(FIRST, read_manifest(manifest.read_bytes(), FIRST).file))
    for path, says in ((file, "has changed since it was written"), (manifest, "its digest differs")):
        before = path.read_bytes()
        # Where neither Parquet nor JSON has a reason to complain.
        path.write_bytes(before.replace(b"parquet-cpp", b"Parquet-cpp") if path == file else before + b"\n")
        assert path.read_bytes() != before
        assert len(history(settings, "order", "42")) == len(seqs)
        done = database.outbox(*asked, OUTBOX_ARCHIVE=settings.archive)
        assert (done.exit_code, done.stdout) == (2, "")
        assert says in done.stderr
        path.write_bytes(before)


def test_nothing_is_known(database: Database) -> None:
    """Guards against an empty table that says neither yes nor no."""
    done = database.outbox("archive", "history", "order", "43")
    assert done.exit_code == 1
    assert done.stderr == "outbox: no events found for order 43\n"
    done = database.outbox("archive", "history", "order", "43", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, [])
