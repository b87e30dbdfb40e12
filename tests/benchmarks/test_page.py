"""The page of benchmarks and the figures that other pages quote are what the results say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.page import PAGE, ROOT, MissingError, pages
from benchmarks.results import Part, load
from benchmarks.table import Figure, Ratio, Row

_ROW = "relay, at_least_once"


def _with(part: str, row: Row | None, **values: object) -> dict[str, Part]:
    """Return the results with another row of this name in a part, or without it."""
    parts = load()
    kept = [each for each in parts[part].rows if each.name != (row.name if row else _ROW)]
    return parts | {part: replace(parts[part], rows=(*kept, *([row] if row else [])), **values)}  # type: ignore[arg-type]


def test_pages_have_the_figures_of_the_results() -> None:
    """Guards against figures that were typed, or measured without `make docs`."""
    for path, text in pages(load()).items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run python -m benchmarks.page"


def test_a_new_result_changes_all_pages_that_quote_it() -> None:
    """Guards against a page whose pattern finds the figure and leaves it."""
    row = Row(
        _ROW,
        (Figure(123_456, "events/s"), Figure(0.75, "CPU-s per 100,000"), Figure(88, "MB", "peak")),
        (Ratio(2.25, "Debezium at its best"),),
    )
    now = _with("peers", row, entered=False, loop_ms=123.4, versions={"Debezium": "9.8"})
    texts = pages(now)
    assert "|relay, at_least_once|123,000 events/s, 0.75 CPU-s per 100,000, peak 88 MB|2.2 × " in texts[PAGE]
    assert "`peers` 123" in texts[PAGE]
    readme = texts[ROOT / "README.md"]
    assert "| **123,000 events/s**; " in readme
    assert "Debezium 9.8, tuned" in readme
    for name in ("architecture", "scale"):
        assert "123,000" in texts[ROOT / "docs" / f"{name}.md"]


def test_a_row_that_is_missing_is_named() -> None:
    """Guards against a figure that leaves the page silently because its row was renamed."""
    with pytest.raises(MissingError, match=f"peers: {_ROW}: .* make bench BENCH=peers"):
        pages(_with("peers", None))


def test_a_figure_that_is_missing_is_named() -> None:
    """Guards against a quote of a figure that a part no longer measures."""
    with pytest.raises(MissingError, match="no figure 'events/s'"):
        pages(_with("peers", Row(_ROW)))
