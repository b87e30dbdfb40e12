"""What a part measures: rows of figures with their units and ratios, and how they are shown.

Invariants:
- A row's name is unique in its part and has nothing measured in it: pages refer to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import NamedTuple


class Figure(NamedTuple):
    """A measured value: a median unless its name says otherwise."""

    value: float
    unit: str
    name: str = ""
    """What it is, if the row has several: p50."""

    def __str__(self) -> str:
        return f"{self.name} {shown(self.value)} {self.unit}".strip()


class Ratio(NamedTuple):
    """A figure divided by the same one of something else of the same run."""

    value: float
    to: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} {multiple(self.value)} {self.to}".strip()


class Row(NamedTuple):
    """What was measured, its figures, their ratios, the goal."""

    name: str
    figures: tuple[Figure, ...] = ()
    ratios: tuple[Ratio, ...] = ()
    goal: str = ""


def shown(value: float) -> str:
    """Return a value with three digits, or with two if it is less than 100."""
    if not value:
        return "0"
    size = math.floor(math.log10(abs(value)))
    return f"{round(value, 2 - size if size > 1 else 1 - size):,.{max(0, 1 - size)}f}"


def multiple(value: float) -> str:
    """Return a ratio with its sign."""
    return f"{value:,.{2 if value < 2 else 1 if value < 10 else 0}f} ×"


def rate(values: float | Sequence[float], name: str = "") -> Figure:
    """Events a second: one value, or the median of several."""
    return Figure(values if isinstance(values, int | float) else median(values), "events/s", name)


def milliseconds(seconds: float, name: str = "") -> Figure:
    """From seconds."""
    return Figure(seconds * 1e3, "ms", name)


def microseconds(seconds: float, name: str = "") -> Figure:
    """From seconds."""
    return Figure(seconds * 1e6, "µs", name)


def memory(megabytes: Iterable[float]) -> Figure:
    """The greatest of several."""
    return Figure(max(megabytes), "MB", "peak")


def latency(seconds: Sequence[float]) -> tuple[Figure, Figure]:
    """Median and 99th percentile."""
    return milliseconds(median(seconds), "p50"), milliseconds(p99(seconds), "p99")


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(values, n=100)[98]


def paired(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median of the rounds' ratios: a drift of the machine falls on both alike."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def render(rows: Iterable[Row], *, is_quick: bool = False) -> str:
    """Return a Markdown table; of a quick run without its figures, which say nothing."""
    cells = [("what", "ratios", "goal") if is_quick else ("what", "figures", "ratios", "goal")]
    for row in rows:
        figures = ", ".join(map(str, row.figures))
        ratios = ", ".join(map(str, row.ratios))
        if not is_quick:
            cells.append((row.name, figures, ratios, row.goal))
        elif ratios:
            cells.append((row.name, ratios, row.goal))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
