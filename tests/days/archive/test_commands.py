"""`outbox archive day` and `verify`, as an operator types them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import Result

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import export
from outbox_pipelines.settings import Settings
from tests.days.archive.days import (
    days_ago,
    edit_manifest,
    file,
    make_days,
    manifest,
    manifest_path,
    past_day,
    publish,
    write_many,
)
from tests.schema.servers import Database


def outbox(database: Database, settings: Settings, *arguments: str) -> Result:
    return database.outbox("archive", *arguments, OUTBOX_ARCHIVE=settings.archive)


def test_a_day_is_written_and_proven(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a command that leaves the proof to another command, or prints nothing for minutes."""
    monkeypatch.setattr(export, "_BATCH_BYTES", 30_000)
    monkeypatch.setattr(export, "_PROGRESS_ROWS", 2000)
    day = days_ago(3)
    make_days(database, day)
    write_many(database, day, 5000)
    publish(database)
    done = outbox(database, settings, "day", str(day))
    assert done.exit_code == 0, done.output
    said = manifest(settings, day)
    assert done.stdout == f"{day}: 5,000 rows, {said.size / 1e6:.1f} MB in {said.file}\n"
    assert len(done.stderr.splitlines()) == 2
    assert all(
        line.startswith(f"{day}: ") and line.endswith(" rows written") for line in done.stderr.splitlines()
    )
    assert database.value("SELECT proven_at IS NOT NULL FROM outbox_days WHERE day = %s", day)
    again = outbox(database, settings, "day", str(day))
    assert (again.exit_code, again.output) == (0, done.stdout.removesuffix("\n") + ", already archived\n")
    verified = outbox(database, settings, "verify", str(day))
    assert (verified.exit_code, verified.output) == (0, f"{day}: 5,000 rows proven equal\n")
    listed = database.outbox("partitions", "list").stdout
    (line,) = [line.split() for line in listed.splitlines() if line.startswith(str(day))]
    assert line[1:3] == ["archived", "5,000"]


def test_json(database: Database, settings: Settings) -> None:
    """Guards against output that a script must guess at."""
    day = past_day(database)
    done = outbox(database, settings, "day", str(day), "--json")
    assert done.stdout.encode() == manifest_path(settings, day).read_bytes()
    said = manifest(settings, day)
    verified = outbox(database, settings, "verify", str(day), "--json")
    proven = {"day": str(day), "rows": said.rows, "differences": [], "changes": []}
    assert json.loads(verified.stdout) == proven
    edit_manifest(settings, day, tool="an editor")
    refuted = outbox(database, settings, "verify", str(day), "--json")
    (difference,) = json.loads(refuted.stdout)["differences"]
    assert (refuted.exit_code, refuted.stderr) == (1, f"outbox: {day}: {difference}\n")


def test_a_file_that_is_lost_is_written_again_when_asked_for(database: Database, settings: Settings) -> None:
    """Guards against an exit code that says all is well over a proof that failed."""
    day = past_day(database)
    days.archive(settings, day)
    lost = file(settings, day)
    lost.unlink()
    done = outbox(database, settings, "day", str(day))
    assert done.exit_code == 1
    assert f"outbox: {day}: {lost.name} is missing" in done.stderr
    assert outbox(database, settings, "day", str(day), "--again").exit_code == 0
    assert lost.exists()


def test_a_day_that_is_not_ready(database: Database, settings: Settings) -> None:
    """Guards against exit codes that a scheduler cannot tell apart: later perhaps, or never so."""
    today = datetime.now(UTC).date()
    for command, code, said in (
        (("day", str(today)), 1, f"{today} is not closed: it ends at midnight UTC"),
        (("verify", str(today)), 1, f"{today} is open, not archived: run `outbox archive day {today}`"),
        (("day", "2020-01-01"), 2, "2020-01-01 is not a day of the outbox"),
        (("verify", "2020-01-01"), 2, "2020-01-01 is not a day of the outbox"),
    ):
        done = outbox(database, settings, *command)
        assert (done.exit_code, done.stdout) == (code, "")
        assert done.stderr.startswith(f"outbox: {said}")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("day",), "Missing argument 'DAY'"),
        (("day", "yesterday"), "'yesterday' is not a day: write a date such as 2026-11-21"),
        (("day", "2026-02-30"), "'2026-02-30' is not a day"),
        (("verify", "2026-11-21", "--again"), "No such option"),
    ],
)
def test_wrong_input(database: Database, settings: Settings, arguments: tuple[str, ...], said: str) -> None:
    """Guards against a stack trace for a slip."""
    done = outbox(database, settings, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_no_archive_is_named(database: Database) -> None:
    """Guards against an archive in the current working directory, whichever that is."""
    for command in ("day", "verify"):
        done = database.outbox("archive", command, "2026-11-01")
        assert done.exit_code == 2
        assert "set OUTBOX_ARCHIVE to a directory, s3://" in done.stderr


def test_looking_makes_no_directory(database: Database, settings: Settings) -> None:
    """Guards against a slip in OUTBOX_ARCHIVE that leaves an empty archive behind."""
    outbox(database, settings, "verify", str(past_day(database)))
    assert not Path(settings.archive).exists()
