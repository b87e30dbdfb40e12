"""`outbox archive report`: its numbers, its page, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import psycopg
import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli
from outbox_pipelines.days.archive import report, report_page
from outbox_pipelines.settings import Settings
from tests.days.archive.reading import ONE, THREE, TWO, event, put_day, three_days

HOSTILE = "</title></svg><script src=http://x>alert(1)</script>'\"><img src=x onerror=a>\u202e\n"


def ask(root: Path | str, *arguments: str) -> Result:
    """Runs the command with the archive as its only setting."""
    none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OUTBOX_")}
    environment = {**none, "OUTBOX_ARCHIVE": str(root)}
    return CliRunner().invoke(cli, ["archive", "report", *arguments], env=environment)


def published(day: date, seq: int, seconds: int, **columns: object) -> dict[str, object]:
    """An event with this lag."""
    created = datetime(day.year, day.month, day.day, tzinfo=UTC)
    at = {"created_at": created, "published_at": created + timedelta(seconds=seconds)}
    return event(day, seq, **{**at, **columns})


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_numbers(tmp_path: Path) -> None:
    """Guards against numbers of other days or types, and unpublished events that lower the lag."""
    put_day(tmp_path, ONE, [published(ONE, 1, 900)])
    put_day(
        tmp_path,
        TWO,
        [
            published(TWO, 2, 4, payload='"é"', aggregate_id="a"),
            published(TWO, 3, -1, aggregate_id="b"),
            event(TWO, 4, event_type="order.paid", status="FAILED", aggregate_id="b", payload='"long text"'),
            event(TWO, 5, event_type="order.paid", status="DISCARDED", aggregate_id="c"),
        ],
    )
    put_day(tmp_path, date(2013, 1, 4), [])
    archive = report.opened(str(tmp_path))
    found = report.read(archive, TWO)
    assert (found.since, found.until, found.unit, found.archived) == (TWO, date(2013, 1, 4), "day", 2)
    assert found.periods == (TWO, THREE, date(2013, 1, 4))
    assert (found.types, found.total[:5]) == (2, (4, 4 + 8 + 11 + 8, 11, 1, 1))
    assert found.by_type["order.placed"] == (2, 12, 8, 0, 0, 2.0, 4.0)
    assert found.by_type["order.paid"] == (2, 19, 11, 1, 1, None, None)
    assert found.by_both[TWO, "order.paid"] == found.by_type["order.paid"]
    assert set(found.by_period) == {TWO}
    assert found.file_bytes[TWO] == archive.manifests[TWO].size
    (largest, *_) = report.largest(archive, found)
    assert largest == (11, "order.paid", "order", "b", TWO, "00000000-0000-7000-8000-000000000004")
    assert report.aggregates(archive, found) == [("order", 3, 4, 3)]
    empty = report.read(archive, date(2013, 1, 4))
    assert (empty.types, empty.total, empty.by_period) == (0, report.Figures(), {})
    report_page.page(empty, report.largest(archive, empty), report.aggregates(archive, empty))


@pytest.mark.parametrize(
    ("since", "unit", "period"),
    [
        (date(2012, 9, 1), "week", date(2012, 12, 31)),
        (date(2010, 1, 1), "month", ONE),
        (date(1990, 1, 1), "year", ONE),
    ],
)
def test_many_days_are_put_together(tmp_path: Path, since: date, unit: str, period: date) -> None:
    """Guards against a thousand bars, and periods of Python that are not those of DuckDB."""
    three_days(tmp_path)
    found = report.read(report.opened(str(tmp_path)), since)
    assert (found.unit, len(found.periods) <= 121) == (unit, True)
    assert {day: each.events for day, each in found.by_period.items()} == {period: 30}
    assert period in found.periods
    assert set(found.file_bytes) == {period}


def test_many_event_types(tmp_path: Path) -> None:
    """Guards against types that are lost, and a rare type whose dead letters are not seen."""
    rows = [event(ONE, seq, event_type=f"type {seq // 2:03}") for seq in range(1000)]
    put_day(tmp_path, ONE, [*rows, event(ONE, 1000, event_type="rare", status="FAILED")])
    found = report.read(report.opened(str(tmp_path)))
    assert (found.types, len(found.by_type)) == (501, 42)
    assert sum(each.events for each in found.by_type.values()) == 1001
    events, *_, dead = report_page.pictures(found)
    assert "493 others" in events
    assert re.search(r"<title>2013-01-01\nrare: 1</title>", dead)
    assert "<td class=text>460 others</td>" in report_page.page(found, [], [])


def test_names_are_text(tmp_path: Path) -> None:
    """Guards against a name that runs in the reader's browser, or makes it ask a server."""
    names = {"event_type": HOSTILE, "aggregate_type": HOSTILE, "aggregate_id": HOSTILE}
    put_day(tmp_path / "archive", ONE, [event(ONE, 1, **names, status="FAILED"), event(ONE, 2)])
    done = ask(tmp_path / "archive", "--output", str(tmp_path / "r.html"))
    assert (done.exit_code, done.stderr) == (0, "")
    text = (tmp_path / "r.html").read_text()
    page = _Tags(text)
    assert not {"script", "img", "a", "link", "iframe", "image", "use"} & page.found
    assert not {name for name in page.attributes if name.startswith("on") or name in ("src", "href", "style")}
    assert "\u202e" not in text
    assert "Content-Security-Policy' content=\"default-src 'none'" in text
    for picture in report_page.pictures(report.read(report.opened(str(tmp_path / "archive")))):
        assert ElementTree.fromstring(picture).find(".//{*}script") is None


def _wrong(tmp_path: Path) -> Iterator[tuple[list[str], str]]:
    yield ["--since", "2013-01-03", "--until", "2013-01-01"], "2013-01-03 is after 2013-01-01"
    yield (
        ["--since", "2014-01-01"],
        "no day is archived from 2014-01-01 to the last: the archive has 2013-01-01 to",
    )
    yield ["--since", "yesterday"], "'yesterday' is not a day"
    yield ["--output", str(tmp_path / "none" / "r.html")], "cannot be written: "
    yield (
        ["--output", str(tmp_path / "archive" / "_outbox" / "archive.json" / "r.html")],
        "which is read-only",
    )
    yield ["--output", f"{__file__}/r.html"], "cannot be written: "
    yield ["--output", str(tmp_path)], "is a directory"
    yield ["--output", str(tmp_path / "archive" / "r.html")], "which is read-only"


def test_what_is_refused(tmp_path: Path) -> None:
    """Guards against a traceback, a file in the archive, and a report of nothing."""
    three_days(tmp_path / "archive")
    before = sorted(tmp_path.rglob("*"))
    for arguments, why in _wrong(tmp_path):
        done = ask(tmp_path / "archive", *arguments)
        assert (done.exit_code, why in done.stderr) == (2, True), (arguments, done.stderr)
        assert isinstance(done.exception, SystemExit)
    assert "is not a directory" in ask(tmp_path / "other", "--output", str(tmp_path / "r.html")).stderr
    assert "no archive configured" in ask("", "--output", str(tmp_path / "r.html")).stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_what_is_replaced(tmp_path: Path) -> None:
    """Guards against a device or a link that becomes a regular file."""
    three_days(tmp_path / "archive")
    link, target, pipe = tmp_path / "link", tmp_path / "other" / "r.html", tmp_path / "pipe"
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):
        assert ask(tmp_path / "archive", "--output", str(link)).exit_code == 0
        assert target.read_text().startswith("<!")
        assert link.readlink() == target
        target.write_text("of yesterday")
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to(pipe)
    for file in (pipe, link):
        done = ask(tmp_path / "archive", "--output", str(file))
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
        assert f"{file} cannot be written: it is no regular file" in done.stderr
        assert pipe.is_fifo()
    link.unlink()
    link.symlink_to(link)
    assert (
        "link cannot be written: Too many levels" in ask(tmp_path / "archive", "--output", str(link)).stderr
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["archive", "link", "other", "pipe"]


def test_the_archive_of_another_outbox(settings: Settings, tmp_path: Path) -> None:
    """Guards against a report that its reader takes for one of this outbox."""
    three_days(Path(settings.archive))
    file = tmp_path / "r.html"
    given = {"OUTBOX_DSN": settings.require_dsn(), "OUTBOX_ARCHIVE": settings.archive}
    command = ["archive", "report", "--output", str(file)]
    assert CliRunner().invoke(cli, command, env=given).exit_code == 0
    file.unlink()
    with psycopg.connect(settings.require_dsn()) as connection:
        connection.execute("SELECT outbox_ensure_partitions(14)")
        connection.execute("UPDATE outbox_days SET archive = gen_random_uuid(), archived_at = now()")
    done = CliRunner().invoke(cli, command, env=given)
    assert (done.exit_code, file.exists()) == (2, False)
    assert "mount the disk, or correct the setting" in done.stderr
