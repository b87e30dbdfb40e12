"""Excerpts of real applications: exactly the lines marked with `# finds OB…` are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outbox_pipelines.lint.linter import check

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.py"))
_MARK = re.compile(r"# finds (OB\d+(?:, OB\d+)*)")


def marked(source: str) -> list[tuple[int, str]]:
    """Lines and codes that a source says are to be found."""
    return sorted(
        (number, code)
        for number, line in enumerate(source.splitlines(), 1)
        if (mark := _MARK.search(line))
        for code in mark.group(1).split(", ")
    )


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_exactly_the_marked_lines(path: Path) -> None:
    """Guards against a missed mistake, and against false alarms, after which the others are not read."""
    assert [(finding.line, finding.code) for finding in check([path])] == marked(path.read_text())


def test_the_fixtures_show_every_rule_about_writes() -> None:
    """Guards against a rule without an example in real code, or a marker that is not understood."""
    codes = {code for path in FIXTURES for _, code in marked(path.read_text())}
    assert codes == {f"OB00{number}" for number in range(1, 9)}
