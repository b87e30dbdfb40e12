"""Writes docs/benchmarks.md from `page.md` and `results.json`, and the figures that other pages quote.

Invariants:
- No figure of the page is typed: a block ``rows`` of `page.md` lists ``part: row``, and becomes a table.
- A row that the page names and the results lack is an error: nothing disappears silently.

As a program: ``python -m benchmarks.page`` writes; ``make docs`` calls it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.quotes import QUOTES, VERSIONS, Quote
from benchmarks.results import Part, load
from benchmarks.table import Row, multiple, shown

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
_TEMPLATE: Final = Path(__file__).with_name("page.md")
_BLOCK: Final = re.compile(r"^```rows\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_FIGURE: Final = r"\d[\d,.]*\d|\d"


class MissingError(Exception):
    """A row or figure that a page names is not in the results."""


def pages(parts: Mapping[str, Part]) -> dict[Path, str]:
    """Return each page that has measured figures, as the results have them."""
    template = _TEMPLATE.read_text().replace("{{runs}}", _runs(parts))
    texts = {PAGE: _BLOCK.sub(lambda block: _table(parts, block[1]), template)}
    for quote in QUOTES:
        path = ROOT / quote.page
        texts[path] = _quoted(parts, quote, texts.get(path) or path.read_text())
    return texts


def _table(parts: Mapping[str, Part], block: str) -> str:
    lines = ["|What|Figures|Ratios|", "|---|---|---|"]
    for line in block.splitlines():
        name, _, row = line.partition(": ")
        found = _row(parts, name, row)
        mark = r"\*" if parts[name].entered else ""
        cells = (found.name + mark, ", ".join(map(str, found.figures)), ", ".join(map(str, found.ratios[:3])))
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines) + "\n"


def _runs(parts: Mapping[str, Part]) -> str:
    """Return a line for each day and versions: its parts, and the milliseconds of the loop."""
    runs: dict[str, list[str]] = {}
    for name, part in sorted(parts.items()):
        versions = ", ".join(" ".join(each) for each in part.versions.items())
        beside = ", beside a process that burned a core" if part.is_busy else ""
        of = f"{part.date}\\*" if part.entered else f"{part.date}, {versions}{beside}"
        loop = "" if part.loop_ms is None else f" {shown(part.loop_ms)}"
        runs.setdefault(of, []).append(f"`{name}`{loop}")
    return "\n".join(f"- {run}: {', '.join(named)}" for run, named in sorted(runs.items()))


def _quoted(parts: Mapping[str, Part], quote: Quote, text: str) -> str:
    pattern = f"({_FIGURE})".join(map(re.escape, quote.text.split("{}")))
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise MissingError(f"{quote.page}: {len(found)} × {quote.text!r}: correct benchmarks/quotes.py")
    values = [_value(parts, *reference) for reference in quote.figures]
    return re.sub(pattern, lambda _: quote.text.format(*values), text)


def _value(parts: Mapping[str, Part], name: str, row: str, figure: str) -> str:
    """Return the figure of this name or unit, or the ratio to this."""
    if row == VERSIONS:
        return parts[name].versions[figure]
    found = _row(parts, name, row)
    for each in found.figures:
        if figure in (each.name, each.unit):
            return shown(each.value)
    for ratio in found.ratios:
        if ratio.to == figure:
            return multiple(ratio.value).removesuffix(" ×")
    raise MissingError(f"{name}: {row}: no figure {figure!r}")


def _row(parts: Mapping[str, Part], name: str, row: str) -> Row:
    try:
        return parts[name].row(row)
    except KeyError:
        raise MissingError(
            f"{name}: {row}: a page names it, and benchmarks/results.json does not have it: "
            f"run make bench BENCH={name}, or correct benchmarks/page.md and quotes.py"
        ) from None


if __name__ == "__main__":
    try:
        texts = pages(load())
    except MissingError as missing:
        sys.exit(str(missing))
    for path, text in texts.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
