"""What an operator says of the events to be sent again."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.replay import replay_topics
from outbox_pipelines.replay.selection import Selection


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no events are selected: give --since"),
        ({"since": "2026-11-22", "until": "2026-11-21"}, "--since 2026-11-22 is not before --until"),
        ({"since": "2026-11-21T08:00Z", "until": "2026-11-21T09:00+01:00"}, "is not before"),
        ({"since": "yesterday"}, "--since yesterday is neither a day nor a time"),
        ({"ids": ("7",)}, "--id 7 is not a UUID"),
        ({"where": "true) OR (true"}, "--where is not a condition in SQL"),
        ({"where": "true; DROP TABLE events"}, "--where is not a condition in SQL"),
        ({"where": "event_type ="}, "--where is not a condition in SQL"),
        ({"where": "Random() < 0.5"}, "--where has random, whose value changes: repeated, it would"),
        ({"where": "created_at > now() - INTERVAL 1 HOUR"}, "--where has now, whose"),
        ({"where": "created_at < CURRENT_TIMESTAMP"}, "--where has current_timestamp, whose"),
        ({"where": "age(created_at) > INTERVAL 1 DAY"}, "--where has current_date, whose"),
        ({"where": "id <> ALL (SELECT uuid()::TEXT)"}, "--where has uuid, whose"),
    ],
)
def test_what_selects_nothing_is_refused(given: dict[str, Any], says: str) -> None:
    """Guards against a replay of everything, of nothing, or with SQL beside its condition."""
    with pytest.raises(SetupError, match=says):
        Selection(**given)


def test_a_day_is_whole_and_a_time_is_exact() -> None:
    """Guards against the last day of a range that is left out, and days that are read in vain."""
    days = Selection(since="2026-11-20", until="2026-11-21")
    assert [days.has(date(2026, 11, day)) for day in (19, 20, 21, 22)] == [False, True, True, False]
    times = Selection(since="2026-11-20T22:00Z", until="2026-11-21T00:00Z")
    assert [times.has(date(2026, 11, day)) for day in (19, 20, 21)] == [False, True, False]
    assert Selection.of_json(times.to_json()) == times


@pytest.mark.parametrize("target", ["", "{", "{event_type}", "a b", "{topic!r}", "{0}", "{topic.x}"])
def test_what_is_no_topic_is_refused(target: str) -> None:
    """Guards against a template that fails after the first events."""
    with pytest.raises(SetupError, match="is no topic: write a name, or a template"):
        replay_topics.check(target)
