"""The table that a run of the benchmarks prints."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One line: what, the figure, its ratio to something of the same run, the goal."""

    what: str
    figure: str
    ratio: str = ""
    goal: str = ""


def render(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = [Row("what", "figure", "ratio", "goal"), *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])
