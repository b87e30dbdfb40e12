"""The tables of `make coverage`: a line for each package, and the least covered files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

_LEAST: Final = 15
# The percentage of a file of five lines says little.
_FEWEST: Final = 20


@dataclass
class Count:
    """What coverage.py counts, of one file or of several."""

    files: int = 0
    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Count:
        """Return the count of one file from coverage.py's summary."""
        return cls(
            1,
            summary["num_statements"],
            summary["covered_lines"],
            summary["num_branches"],
            summary["covered_branches"],
        )

    def add(self, other: Count) -> None:
        self.files += other.files
        self.lines += other.lines
        self.lines_run += other.lines_run
        self.branches += other.branches
        self.branches_run += other.branches_run

    @property
    def percent(self) -> float:
        """Return the covered part of lines and branches together, as coverage.py computes it."""
        possible = self.lines + self.branches
        return 100.0 * (self.lines_run + self.branches_run) / possible if possible else 100.0


def tables(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables for the member `files` of coverage.py's JSON report."""
    counts = {PurePosixPath(name): Count.of(found["summary"]) for name, found in files.items()}
    packages: dict[str, Count] = {}
    total = Count()
    for name, count in counts.items():
        packages.setdefault(str(name.parent), Count()).add(count)
        total.add(count)
    large = [each for each in counts.items() if each[1].lines + each[1].branches >= _FEWEST]
    least = sorted(large, key=lambda each: (each[1].percent, each[0]))[:_LEAST]
    return "\n".join(
        [
            _head("package"),
            *(_line(name, packages[name]) for name in sorted(packages)),
            _line("total", total),
            "",
            _head("least covered files"),
            *(_line(str(name), count) for name, count in least),
        ]
    )


def _head(title: str) -> str:
    return f"{title:<56} files   lines not run branches not run  covered"


def _line(name: str, count: Count) -> str:
    return (
        f"{name:<56} {count.files:>5,} {count.lines:>7,} {count.lines - count.lines_run:>7,} "
        f"{count.branches:>8,} {count.branches - count.branches_run:>7,} {count.percent:>7.1f}%"
    )
