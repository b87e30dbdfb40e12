"""How often a sensor reports a check: a day of ticks for each way in which a result changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox_pipelines.defs.ticks import Reported

TICKS = 2_880
EVERY = 30.0


def a_day(result: Callable[[int], tuple[int, str]]) -> list[int]:
    """The ticks of a day, one every 30 seconds, that report a check."""
    last, found = Reported(), []
    for tick in range(TICKS):
        status, text = result(tick)
        # The cursor of a tick is far from zero.
        if last.is_due(status, text, 1e9 + tick * EVERY):
            last.report(status, text, 1e9 + tick * EVERY)
            found.append(tick)
    return found


@pytest.mark.parametrize(
    ("result", "most"),
    [
        (lambda tick: (0, "well"), 1),
        (lambda tick: (0, f"{tick} events"), 1),
        (lambda tick: (2, "1 dead letter"), 1),
        # An age that grows.
        (lambda tick: (2, f"oldest unpublished event: {tick} s"), 30),
        # A value at its limit, and a reason that changes each time.
        (lambda tick: (tick % 2, "lag"), 240),
        (lambda tick: (2, "refused" if tick % 2 else "timed out"), 240),
    ],
)
def test_what_a_day_costs(result: Callable[[int], tuple[int, str]], most: int) -> None:
    """Guards against entries of Dagster's storage that only SQL could remove."""
    assert 1 <= len(a_day(result)) <= most


def test_a_result_that_stays_is_reported_once_a_day() -> None:
    last = Reported()
    last.report(0, "well", 0.0)
    assert [now for now in (86_399.0, 86_400.0) if last.is_due(0, "well", now)] == [86_400.0]


def test_news_are_reported_at_once() -> None:
    """Guards against a failure, its end or another reason that a page shows an hour late."""
    states = {0: (0, "well"), 200: (2, "lag 60 s"), 900: (2, "refused"), 1800: (1, "lag 15 s"), 2000: (0, "")}
    found = a_day(lambda tick: states[max(begin for begin in states if begin <= tick)])
    assert found == list(states)


def test_the_end_of_an_oscillation_is_reported() -> None:
    """Guards against a page that shows the failure of a check that has recovered."""
    found = a_day(lambda tick: (tick % 2 if tick < 1_000 else 0, "lag"))
    assert [tick for tick in found if tick >= 1_000][:1] <= [1_000 + 120]
    assert len(found) % 2 == 1


@pytest.mark.parametrize("better", [0, 1])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_failure_is_reported_at_once_after_any_number_of_changes(better: int, begin: int) -> None:
    """Guards against a check that is green, or warns, for an hour while its result is an error."""
    last, limited = Reported(), 0
    for tick in range(TICKS):
        status, now = (better if (tick + begin) % 2 else 2), 1e9 + tick * EVERY
        if last.is_due(status, "lag", now):
            last.report(status, "lag", now)
        assert last.status is not None
        assert last.status >= status
        limited += last.status > status
    assert limited > TICKS / 3


def test_a_limited_check_catches_up_with_its_result() -> None:
    """Guards against a check that stays red after its recovery, or reports a state that has passed."""
    states = [0, 1, 2, 1, 0] * 4
    found = a_day(lambda tick: (states[tick] if tick < len(states) else 0, "lag"))
    assert found[-1] <= 120 + len(states)
    last = found[-1]
    assert last >= len(states)
