"""Figures of one factor at sizes ten apart, and what each tenfold does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from benchmarks import table as rows_of
from benchmarks.table import Ratio, Row, milliseconds, p99, rate

__all__ = ["FLAT", "Figure", "megabytes", "milliseconds", "number", "p99", "rate", "seconds", "table"]


class Figure(NamedTuple):
    """What is measured at each size."""

    name: str
    show: Callable[[float], rows_of.Figure]
    goal: str = ""


FLAT: Final = "flat within 10 %"


def megabytes(value: float) -> rows_of.Figure:
    """From bytes."""
    return rows_of.Figure(value / 1e6, "MB")


def seconds(value: float) -> rows_of.Figure:
    """Of CPU, or of time."""
    return rows_of.Figure(value, "s")


def number(value: float) -> rows_of.Figure:
    """Of anything."""
    return rows_of.Figure(value, "")


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
            growth = (Ratio(value / before, "per tenfold"),) if before else ()
            name = f"{what.format(size)}: {figure.name}"
            rows.append(Row(name, (figure.show(value),), growth, figure.goal))
            before = None if size == base else value
    return rows
