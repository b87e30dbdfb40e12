"""Which cells `make matrix` has; what a cell runs is tested by the suite."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.__main__ import ROOT, TESTS
from tests.matrix.cells import POSTGRES, PYTHONS, Cell, cells


def test_each_version_runs_or_says_why_not() -> None:
    """Guards against a version that silently has no cell."""
    here, other, programs = Path("here"), Path("other"), Path("15/bin")
    found = {each.name: each for each in cells({"3.12": other}, {"15": programs}, here)}
    assert list(found) == [f"python{each}" for each in PYTHONS] + [f"postgresql{each}" for each in POSTGRES]
    assert found.pop("python3.12") == Cell("python3.12", other)
    assert found.pop("postgresql15") == Cell("postgresql15", here, programs)
    assert all(each.skipped for each in found.values())


def test_the_tests_exist() -> None:
    assert [each for each in TESTS if not (ROOT / each).is_file()] == []
