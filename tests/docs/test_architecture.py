"""The pages for contributors name the files that there are, and stay short enough to be read."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("docs/architecture.md", "docs/decisions.md", "docs/verification.md", "CONTRIBUTING.md")
FOLDERS = ("outbox_pipelines", "tests", "docs", "sql", "deploy", "examples", "benchmarks", "locks")
NAMES = runpy.run_path(str(ROOT / "docs/files_page.py"))


def test_each_file_says_its_purpose_in_a_line() -> None:
    """Guards against a list in which a file is missing, or its line ends in the middle of a sentence."""
    files = dict(NAMES["files"]())
    assert len(files) > 200
    assert {str(path) for path, text in files.items() if not text.endswith(".")} == set()
    listing = NAMES["listing"]()
    assert [path for path, text in files.items() if text not in listing] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    """Guards against a page that names a file that was moved or renamed."""
    there = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    there += [f"/{path.name}" for path in ROOT.iterdir()]
    named = set(re.findall(r"`([\w./-]+\.(?:py|sql|toml|yml|txt|cfg))[`:]", (ROOT / page).read_text()))
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in there)} == set()


def test_the_architecture_is_read_at_once() -> None:
    assert _words(ROOT / "docs/architecture.md") <= 2_700


def test_the_pages_stay_short() -> None:
    """Guards against a documentation that is too long to be read: shorten it by what you add."""
    assert sum(_words(page) for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]) <= 45_000


def _words(page: Path) -> int:
    return len(page.read_text().split())
