"""README.md: short, its examples run, what it shows is printed, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks.__main__ import PARTS
from outbox_pipelines.consumer import Consumer, migrate
from outbox_pipelines.consumer.testing import handle, make_event
from tests.conftest import Outbox

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
WRITER, CONSUMER = [text for language, text in _FENCE.findall(README) if language == "python"]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "locks").glob("*.md")]


def anchors(path: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Guards against pages that were renamed; `make docs` looks at those of docs/."""
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", _FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_examples_run(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a first call that fails."""
    with outbox.connect() as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, state text NOT NULL)")
        connection.execute("INSERT INTO orders VALUES (42, 'new')")
        connection.execute("CREATE TABLE invoices (order_id text PRIMARY KEY)")
        migrate(connection)
    names: dict[str, Any] = {
        "dsn": outbox.settings.dsn.reveal(),
        "kafka": outbox.settings.kafka,
        "order_id": 42,
    }
    monkeypatch.setattr(Consumer, "run", lambda consumer: None)
    for example in (WRITER, CONSUMER):
        exec(compile(example, "README.md", "exec", dont_inherit=True), names)
    with psycopg.connect(names["dsn"]) as connection:
        row = connection.execute("SELECT aggregate_id, payload FROM outbox").fetchone()
        assert row == ("42", {"total": 5})
        assert connection.execute("SELECT state FROM orders").fetchone() == ("placed",)
        event = make_event("order.placed", {"total": 5}, aggregate_id=42)
        assert handle(names["consumer"], event, using=connection) == ["handled"]
        assert connection.execute("SELECT order_id FROM invoices").fetchone() == ("42",)


def test_the_report_of_the_demo_is_printed() -> None:
    """Guards against a sample with rows that the demo does not print."""
    report = next(text for _, text in _FENCE.findall(README) if text.startswith("Verified"))
    sources = "".join(path.read_text() for path in (ROOT / "examples" / "airline").glob("*.py"))
    heading, *rows = report.splitlines()
    assert heading in sources
    for name, note in re.findall(r"^  (\S.*?)  +.*?(?:\((.*)\))?$", "\n".join(rows), re.MULTILINE):
        assert f'"{name}"' in sources
        assert name == "days gone by" or note in sources


def test_every_benchmark_is_named() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    sections = re.findall(r"^Parts: ([`\w, ]+)\.", page, re.MULTILINE)
    others = re.findall(r"^- `(\w+)`: ", page, re.MULTILINE)
    assert {*re.findall(r"`(\w+)`", " ".join(sections)), *others} == set(PARTS)
