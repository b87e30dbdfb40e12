"""Which months are missing, and their names."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest

from outbox_pipelines.existing import months
from outbox_pipelines.existing.months import Month


def _at(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc]


NOW = _at(2026, 11, 23, 20)


@pytest.mark.parametrize(
    ("newest_end", "ahead", "bounds"),
    [
        (None, 1, [(2026, 11, 1), (2026, 12, 1), (2027, 1, 1)]),
        (_at(2026, 12, 1), 2, [(2026, 12, 1), (2027, 1, 1), (2027, 2, 1)]),
        (_at(2027, 2, 1), 2, []),
        # None were made for months.
        (_at(2026, 8, 1), 1, [(2026, 11, 1), (2026, 12, 1), (2027, 1, 1)]),
        # Midnight in Berlin; the first one is an hour longer.
        (_at(2026, 11, 30, 23), 1, [(2026, 11, 30, 23), (2027, 1, 1)]),
        # Midnight in New York.
        (_at(2026, 12, 1, 5), 1, [(2026, 12, 1, 5), (2027, 1, 1)]),
        # Of a week.
        (_at(2026, 11, 29), 1, [(2026, 11, 29), (2027, 1, 1)]),
        (_at(2027, 1, 31), 3, [(2027, 1, 31), (2027, 3, 1)]),
    ],
)
def test_missing_months(newest_end: datetime | None, ahead: int, bounds: list[tuple[int, ...]]) -> None:
    """Guards against a gap, in which writers fail, and an overlap, which PostgreSQL refuses."""
    expected = [Month(_at(*since), _at(*until)) for since, until in itertools.pairwise(bounds)]
    assert list(months.missing(NOW, newest_end, ahead)) == expected


@pytest.mark.parametrize(
    ("newest", "since", "name"),
    [
        (None, None, "events_p2026_12"),
        ("events_2026_11", _at(2026, 11, 1), "events_2026_12"),
        ("events_p2026_11", _at(2026, 11, 1), "events_p2026_12"),
        ("events_p2026_11_01", _at(2026, 11, 1), "events_p2026_12_01"),
        ("events_p20261101", _at(2026, 11, 1), "events_p20261201"),
        ("events_202611", _at(2026, 11, 1), "events_202612"),
        ("events_y2026m11", _at(2026, 11, 1), "events_y2026m12"),
        ("Events 2026-11", _at(2026, 11, 1), "Events 2026-12"),
        # Midnight in Berlin, the evening before in UTC.
        ("events_2026_11", _at(2026, 10, 31, 23), "events_2026_12"),
        ("the_newest", _at(2026, 11, 1), "events_p2026_12"),
    ],
)
def test_names(newest: str | None, since: datetime | None, name: str) -> None:
    month = Month(_at(2026, 12, 1), _at(2027, 1, 1))
    assert months.partition_name(month, "events", newest, since) == name


def test_the_name_of_a_long_month_and_of_a_long_table() -> None:
    """Guards against a name that PostgreSQL would truncate, so that two months have the same one."""
    month = Month(_at(2026, 11, 30, 23), _at(2027, 1, 1))
    assert months.partition_name(month, "é" * 31, None, None) == "é" * 27 + "_p2026_12"
