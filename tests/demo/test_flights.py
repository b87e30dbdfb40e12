"""The stream of real flights."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest

from examples.airline import flights
from examples.airline.flights import ARRIVED, CANCELLED, DEPARTED, SCHEDULED, operations
from outbox_pipelines.errors import SetupError

COUNT = 3000


def test_comes_in_the_order_of_time() -> None:
    stream = list(operations(COUNT))
    assert all(before.at <= after.at for before, after in pairwise(stream))
    # Otherwise what is late would be left behind at midnight.
    assert len({operation.at.date() for operation in stream}) >= 4


def test_tells_each_flights_story_in_order() -> None:
    stories: dict[int, list[str]] = {}
    for operation in operations(COUNT):
        for flight in operation.flights:
            stories.setdefault(flight.id, []).append(operation.event_type)
    assert sorted(stories) == list(range(1, COUNT + 1))
    assert {tuple(story) for story in stories.values()} == {
        (SCHEDULED, DEPARTED, ARRIVED),
        (SCHEDULED, DEPARTED),  # came down elsewhere
        (SCHEDULED, CANCELLED),
    }


def test_is_the_same_each_time() -> None:
    assert list(operations(500)) == list(operations(500))


def test_plans_an_aircrafts_day_in_one_transaction() -> None:
    plans = [operation for operation in operations(COUNT) if operation.event_type == SCHEDULED]
    assert any(len(plan.flights) > 1 for plan in plans)
    for plan in plans:
        assert len({(flight.tail_number, flight.origin) for flight in plan.flights}) == 1
        if plan.flights[0].tail_number is None:
            assert len(plan.flights) == 1


def test_is_real() -> None:
    first = next(operations(1)).flights[0]
    assert (first.number, first.tail_number, first.origin, first.destination) == (
        "UA1545",
        "N14228",
        "EWR",
        "IAH",
    )
    assert first.scheduled_for.isoformat() == "2013-01-01T10:15:00+00:00"
    assert first.departed_at is not None
    assert first.departed_at.isoformat() == "2013-01-01T10:17:00+00:00"


def test_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"pip install 'outbox-pipelines\[demo\]'"):
        next(flights.operations(1))
