"""The tables of `make coverage`, from a report that coverage.py could have written."""

from __future__ import annotations

from tests.coverage.table import tables


def _file(lines: int, lines_run: int, branches: int, branches_run: int) -> dict[str, dict[str, int]]:
    return {
        "summary": {
            "num_statements": lines,
            "covered_lines": lines_run,
            "num_branches": branches,
            "covered_branches": branches_run,
        }
    }


def test_packages_are_summed_and_files_sorted() -> None:
    """Guards against a table that hides branches, or that begins with the best file."""
    packages, least = tables(
        {
            "package/a.py": _file(30, 30, 10, 10),
            "package/part/b.py": _file(30, 15, 10, 5),
            "package/part/c.py": _file(40, 40, 20, 10),
            "package/part/tiny.py": _file(2, 0, 0, 0),
        }
    ).split("\n\n")
    assert [line.split() for line in packages.splitlines()[1:]] == [
        ["package", "1", "30", "0", "10", "0", "100.0%"],
        ["package/part", "3", "72", "17", "30", "15", "68.6%"],
        ["total", "4", "102", "17", "40", "15", "77.5%"],
    ]
    assert [line.split()[0] for line in least.splitlines()[1:]] == [
        "package/part/b.py",
        "package/part/c.py",
        "package/a.py",
    ]
