"""What holds for all of `examples/`."""

from __future__ import annotations

import re

from outbox_pipelines.lint.linter import check, python_files
from tests.examples.services import EXAMPLES


def test_lint_writes_finds_nothing() -> None:
    """Guards against examples that our own linter reports, or cannot read."""
    assert check(python_files([EXAMPLES])) == []


def test_the_table_names_them_all() -> None:
    """Guards against an example that is not listed, or a row of one that no longer exists."""
    linked = re.findall(r"^\| \[`([^`]+?)/?`\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    there = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__init__.py", "__pycache__"}
    assert sorted(linked) == sorted(there)
