"""The changes that CONTRIBUTING.md shows fit the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
DIFFS = list(re.finditer(r"^( *)```diff\n(.*?)^\1```$", PAGE, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("found", DIFFS, ids=lambda found: f"line {PAGE[: found.start()].count(chr(10)) + 1}")
def test_a_diff_fits_its_file(found: re.Match[str]) -> None:
    """Guards against instructions for code that has changed since."""
    *_, file = re.findall(r"`(outbox_pipelines/[\w/]+\.py)`", PAGE[: found.start()])
    lines = [line.removeprefix(found[1]) for line in found[2].splitlines()]
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
    code = (ROOT / file).read_text()
    # Who follows the page runs this test too.
    assert before in code or after in code, f"{file} has no such lines, correct the page:\n{before}"


def test_there_are_diffs() -> None:
    assert len(DIFFS) == 4
