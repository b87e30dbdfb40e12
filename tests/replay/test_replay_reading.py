"""The order of the events of several days, and days that leave the table while they are read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from outbox_pipelines.database import connect
from outbox_pipelines.replay import replay_reading
from outbox_pipelines.replay.replay_reading import Reader, Rows
from outbox_pipelines.replay.selection import Selection
from tests.reconciliation.place import DAY, Place
from tests.replay.test_replays import NEXT, dropped

ALL = Selection(since=str(DAY))


def ids(batches: Iterable[Rows]) -> list[str]:
    return [row[1] for batch in batches for row in batch]


def test_days_around_midnight_are_read_in_one_order(place: Place) -> None:
    """Guards against a later event of an aggregate that comes first, since its transaction began earlier."""
    written = [event_id for day in (DAY, NEXT, DAY, NEXT) for event_id in place.write(2, day=day)]
    place.relay()
    with connect(place.settings, name="test") as connection:
        assert ids(Reader(place.settings, connection, ALL).events(0, 1_000)) == written
        dropped(place)
        reader = Reader(place.settings, connection, ALL)
        assert ids(reader.events(0, 1_000)) == written
        (third,) = place.rows("SELECT min(seq) + 2 FROM outbox")
        assert ids(reader.events(third[0] - 1, third[0] + 1)) == written[4:6]


def test_a_day_that_is_dropped_is_read_on_in_the_archive(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against events that are passed over, since their partition was dropped between two reads."""
    monkeypatch.setattr(replay_reading, "_TABLE_STEP", 4)
    written = place.write(10) + place.write(6, day=NEXT)
    place.relay()
    with connect(place.settings, name="test") as connection:
        batches = Reader(place.settings, connection, ALL).events(0, 1_000)
        before = ids([next(batches)])
        dropped(place)
        assert 0 < len(before) < 10
        assert before + ids(batches) == written
