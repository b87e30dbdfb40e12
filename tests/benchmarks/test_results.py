"""A run of one part replaces that part alone, and loses no figure on its way to the file and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import RESULTS, Part, load, store
from benchmarks.table import Figure, Ratio, Row, multiple, render, shown

_ROWS = (
    Row(
        "relay", (Figure(194_120.0, "events/s"), Figure(99, "MB", "peak")), (Ratio(2.7, "Debezium"),), "≥ 2 ×"
    ),
    Row("limit", (Figure(0.0, "ms"),)),
)


def test_a_run_replaces_its_part_alone(tmp_path: Path) -> None:
    """Guards against a run of one part that drops what others measured."""
    path = tmp_path / "results.json"
    assert load(path) == {}
    first = Part(date="2026-11-01", rows=_ROWS, entered=True)
    again = Part(date="2026-11-28", rows=_ROWS[:1], loop_ms=80.5, is_busy=True, versions={"Kafka": "4.1"})
    for name, part in (("peers", first), ("cdc", first), ("peers", again)):
        store(name, part, path)
    assert load(path) == {"cdc": first, "peers": again}


def test_the_file_is_as_it_is_written(tmp_path: Path) -> None:
    """Guards against a file that the next run formats anew, so that its change hides in others."""
    path = tmp_path / "results.json"
    for name, part in load().items():
        store(name, part, path)
    assert path.read_text() == RESULTS.read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (194_123, "194,000"),
        (1_049, "1,050"),
        (465.4, "465"),
        (12.34, "12"),
        (2.34, "2.3"),
        (0.654, "0.65"),
        (0, "0"),
    ],
)
def test_values_are_rounded(value: float, text: str) -> None:
    """Guards against digits that the next run would not repeat."""
    assert shown(value) == text


def test_ratios_are_rounded() -> None:
    """Guards against 1.05 × shown as 1.1 ×, which doubles a cost of 5 %."""
    assert [multiple(value) for value in (0.654, 1.05, 2.71, 10.4)] == ["0.65 ×", "1.05 ×", "2.7 ×", "10 ×"]


def test_a_quick_run_shows_ratios_only() -> None:
    """Guards against figures of small sizes that are taken for results."""
    assert "194,000" in render(_ROWS)
    text = render(_ROWS, is_quick=True)
    assert "2.7 × Debezium" in text
    assert "194,000" not in text
    assert "limit" not in text
