"""The order of the events of several days, and days that leave the table while they are read."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from outbox_pipelines.core.event import Event
from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.replay import replay_reading, seq_order
from outbox_pipelines.replay.replay_reading import Reader
from outbox_pipelines.replay.selection import Selection
from tests.conftest import clean_environment
from tests.reconciliation.place import DAY, Place
from tests.replay.test_replays import NEXT, dropped

ALL = Selection(since=str(DAY))


def ids(batches: Iterable[list[Event]]) -> list[str]:
    return [event.id for batch in batches for event in batch]


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


@pytest.mark.extended
def test_a_file_that_is_gone_is_looked_for_again(place: Place) -> None:
    """Guards against a trace of Python where a file is gone, and events that a new place of a day loses."""
    first, second = place.write(3), place.write(3, day=NEXT)
    place.relay()
    dropped(place)
    with connect(place.settings, name="test") as connection:
        reader = Reader(place.settings, connection, ALL)
        assert ids(reader.events(0, 1_000)) == first + second
        (file,) = Path(str(place.settings.archive)).glob(f"events/event_date={DAY}/*.parquet")
        batches = reader.events(0, 1_000)
        file.rename(file.with_name("gone"))
        with pytest.raises(SetupError, match=f"{file.name} is missing in"):
            next(batches)
        dropped(place, NEXT)
        file.with_name("gone").rename(file)
        assert ids(reader.events(0, 1_000)) == first + second


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_dead_letter_that_was_published_since_is_read(place: Place, is_dropped: bool) -> None:
    """Guards against a gap where a dead letter was, or one that is sent although it was discarded."""
    written = place.write(4)
    place.relay()
    rows = "SELECT *, 'failed' FROM outbox ORDER BY seq LIMIT 3"
    place.rows(f"INSERT INTO outbox_parked {rows}")
    if is_dropped:
        dropped(place)
    seqs = [seq for (seq,) in place.rows("SELECT seq FROM outbox_parked ORDER BY seq")]
    for action, seq in (("replay", seqs[0]), ("discard", seqs[1])):
        place.rows("SELECT outbox_act(%s, %s, 'why', '{}', 'me')", action, [seq])
    place.rows("SELECT outbox_release(%s)", [seqs[0]])
    # After a week, only the audit knows.
    place.rows("DELETE FROM outbox_released")
    with connect(place.settings, name="test") as connection:
        reader = Reader(place.settings, connection, ALL)
        assert ids(reader.events(0, 1_000)) == [written[0], written[3]]
        assert [number for *_, number, _ in reader.count()] == [2]


@pytest.mark.extended
def test_large_events_are_read_in_small_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory that grows with the size of events, in the table and in files."""
    payload = json.dumps({"text": "x" * 5_000})
    monkeypatch.setattr(replay_reading, "_TABLE_BYTES", 20_000)
    monkeypatch.setattr(replay_reading, "_BYTES", 20_000)
    monkeypatch.setattr(seq_order, "_BYTES", 20_000)
    written = place.write(30, payload=payload) + place.write(30, day=NEXT, payload=payload)
    place.relay()
    dropped(place)
    with connect(place.settings, name="test") as connection:
        read = list(Reader(place.settings, connection, ALL).events(0, 1_000))
    assert ids(read) == written
    assert max(map(len, read)) <= 5


MEASURE = """
import resource, sys
from outbox_pipelines.database import connect
from outbox_pipelines.replay.replay_reading import Reader
from outbox_pipelines.replay import replays
from outbox_pipelines.replay.selection import Selection
from outbox_pipelines.settings import load_settings

settings = load_settings()
with connect(settings, name="test") as connection:
    reader = Reader(settings, connection, Selection(where="true"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(len(event.payload) for events in reader.events(0, 10**9) for event in events)
print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.extended
@pytest.mark.parametrize("is_dropped", [False, True])
def test_memory_does_not_grow_with_large_events(place: Place, is_dropped: bool) -> None:
    """Guards against a replay that takes as much memory as a window of events of 1 MB."""
    payload = json.dumps({"text": random.Random(1).randbytes(450_000).hex()})
    place.write(200, payload=payload)
    place.pass_over()
    if is_dropped:
        dropped(place)
    environment = clean_environment() | place.outbox.environment
    environment["OUTBOX_ARCHIVE"] = str(place.settings.archive)
    shown = subprocess.run(
        [sys.executable, "-c", MEASURE], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    # Before it DuckDB draws its progress, where a query takes long and the program has no file.
    size, grown = map(int, shown.stdout.split()[-2:])
    assert size == 200 * len(payload)
    assert grown < 150
