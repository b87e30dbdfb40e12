"""Figures of one factor at sizes ten apart, and what each tenfold does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Final, NamedTuple

from benchmarks.table import Row


class Figure(NamedTuple):
    """What is measured at each size."""

    name: str
    show: Callable[[float], str]
    goal: str = ""


FLAT: Final = "flat within 10 %"


def rate(value: float) -> str:
    """Events a second."""
    return f"{value:,.0f} events/s"


def megabytes(value: float) -> str:
    """From bytes."""
    return f"{value / 1e6:,.1f} MB"


def milliseconds(value: float) -> str:
    """From seconds."""
    return f"{value * 1000:,.2f} ms"


def seconds(value: float) -> str:
    """Of CPU, or of time."""
    return f"{value:,.2f} s"


def number(value: float) -> str:
    """Of anything."""
    return f"{value:,.0f}"


def p99(found: list[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(found, n=100)[98]


def table(
    what: str, figures: Sequence[Figure], found: Mapping[str, Mapping[str, float]], *, base: str = ""
) -> list[Row]:
    """Return a row for each figure at each size, with its growth since the size before.

    Args:
        found: for each size, in order, the figures by their names.
        base: the size that has none before it, and does not count as one.
    """
    rows = []
    for figure in figures:
        before: float | None = None
        for size, values in found.items():
            if figure.name not in values:
                continue
            value = values[figure.name]
            growth = f"{value / before:.2f} × per tenfold" if before else ""
            rows.append(Row(f"{what.format(size)}: {figure.name}", figure.show(value), growth, figure.goal))
            before = None if size == base else value
    return rows
