"""Retention of the archive: what is too old goes, by aggregate type, and nothing else does."""

from __future__ import annotations

import re

import pytest
from click.testing import Result

from outbox_pipelines.config import parsed
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import day_events
from outbox_pipelines.settings import Settings, load_settings
from tests.days.archive.days import days_ago, file, make_days, manifest, names, publish, rows, write
from tests.schema.servers import Database

# The last is archived only.
OLD, OLDER, OLDEST, IN_TABLE = map(days_ago, (3, 4, 6, 7))
RETENTION = "order=3,*=4"


def outbox(database: Database, settings: Settings, *arguments: str, retention: str = RETENTION) -> Result:
    return database.outbox(
        "archive",
        *arguments,
        OUTBOX_ARCHIVE=settings.archive,
        OUTBOX_ARCHIVE_RETENTION_DAYS=retention,
        OUTBOX_RETENTION_DAYS="1",
    )


@pytest.fixture
def dropped(database: Database, settings: Settings) -> Settings:
    """Three days of two aggregate types that are dropped, and one that is only archived."""
    make_days(database, IN_TABLE)
    for day in (IN_TABLE, OLDEST, OLDER, OLD):
        write(database, day, [{"aggregate_type": each} for each in ("order", "order", "invoice")])
    publish(database)
    for day in (IN_TABLE, OLDEST, OLDER, OLD):
        days.archive(settings, day)
    for day in (OLDEST, OLDER, OLD):
        drop.drop(settings, day)
    return settings


def test_what_is_too_old_goes(database: Database, dropped: Settings) -> None:
    """Guards against an event that goes too early or stays, and a removed day that counts as missing."""
    before = {day: manifest(dropped, day) for day in (OLDEST, OLDER, OLD)}
    dry = outbox(database, dropped, "expire", "--dry-run")
    assert (dry.exit_code, dry.stdout.splitlines()) == (
        0,
        [
            f"{OLDEST}: 3 of 3 events would be removed (invoice, order)",
            f"{OLDER}: 2 of 3 events would be removed (order)",
        ],
    )
    assert {day: manifest(dropped, day) for day in before} == before
    done = outbox(database, dropped, "expire")
    assert done.exit_code == 0, done.output
    assert done.stdout == dry.stdout.replace("would be ", "")
    assert rows(dropped, OLDEST) == []
    assert [row["aggregate_type"] for row in rows(dropped, OLDER)] == ["invoice"]
    assert manifest(dropped, OLD) == before[OLD]
    assert manifest(dropped, IN_TABLE).changes == ()
    for day in before:
        assert names(dropped, day) == [file(dropped, day).name]
        assert outbox(database, dropped, "verify", str(day)).exit_code == 0
    shown = outbox(database, dropped, "verify", str(OLDEST)).stdout.splitlines()
    assert shown[0] == f"{OLDEST}: 0 rows proven equal"
    assert shown[1].startswith("changed: invoice, order expired, removed 3 events on ")
    assert shown[1].endswith(": older than 3, 4 days (OUTBOX_ARCHIVE_RETENTION_DAYS)")
    # Once more: nothing.
    again = outbox(database, dropped, "expire")
    assert (again.exit_code, again.stdout) == (0, "no archived events have expired\n")
    listed = database.outbox("partitions", "list").stdout.splitlines()
    assert [line.split()[1:3] for line in listed if line.startswith(str(OLDEST))] == [["dropped", "0"]]
    assert outbox(database, dropped, "restore", str(OLDEST)).exit_code == 0
    with pytest.raises(
        SetupError, match=rf"2 events of {OLDER} were removed by retention on \d.*: the day cannot be"
    ):
        next(day_events._of_archive(dropped, OLDER, None))


def test_a_day_that_cannot_be_read_does_not_stop_others(database: Database, dropped: Settings) -> None:
    """Guards against a damaged file because of which nothing expires any more."""
    file(dropped, OLDEST).write_bytes(b"PAR1")
    done = outbox(database, dropped, "expire")
    assert done.exit_code == 1
    assert f"outbox: {OLDEST} stays: " in done.stderr
    assert f"outbox archive verify {OLDEST}" in done.stderr
    assert done.stdout == f"{OLDER}: 2 of 3 events removed (order)\n"


@pytest.mark.extended
def test_no_retention(database: Database, dropped: Settings) -> None:
    """Guards against an archive that is emptied by a default, or by a slip."""
    unset = outbox(database, dropped, "expire", retention="")
    assert (unset.exit_code, "no archived events expire: set OUTBOX_ARCHIVE_RET" in unset.stderr) == (2, True)
    other = outbox(database, dropped, "expire", retention="refund=2")
    assert (other.exit_code, other.stdout) == (0, "no archived events have expired\n")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"order": 29}, "order=29 is less than OUTBOX_RETENTION_DAYS (30)"),
        ({"order": True}, "order=True is not a number of days"),
        ({"order": "7 years"}, "order=7 years is not a number of days: write order=N, 1 to 36500"),
        ("order=0", "order=0 is not a number of days"),
        ("order=-1", "order=-1 is not a number of days"),
        ({"order": 1.5}, "order=1.5 is not a number of days"),
        ("order=40,*=99999999999", "*=99999999999 is not a number of days: write *=N"),
        ("order=40,*=36501", "*=36501 is not a number of days"),
        ("=400", "=400 names no aggregate type: write order=400"),
        ("order", "part 1 is not name=value"),
    ],
)
def test_a_retention_that_cannot_be_meant(given: object, says: str) -> None:
    """Guards against an archive that is emptied before its rows leave the table."""
    with pytest.raises(SetupError, match=re.escape(f"OUTBOX_ARCHIVE_RETENTION_DAYS {says}")):
        parsed.archive_retention(load_settings(archive_retention_days=given))


def test_a_wrong_retention_stops_only_what_uses_it(database: Database, dropped: Settings) -> None:
    """Guards against a mistake about the archive that stops the proof of its days, and one that a check of
    the settings does not show."""
    assert outbox(database, dropped, "verify", str(OLD), retention="order=7 years").exit_code == 0
    done = outbox(database, dropped, "expire", retention="order=7 years")
    assert (done.exit_code, "order=7 years is not a number of days" in done.stderr) == (2, True)
    for retention in ("order=0", "order"):
        found = database.outbox("config", "check", OUTBOX_ARCHIVE_RETENTION_DAYS=retention)
        assert found.exit_code == 1
        assert any(line.startswith("OUTBOX_ARCHIVE_RETENTION_DAYS: ") for line in found.stdout.splitlines())
