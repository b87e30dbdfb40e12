"""Handlers that take many events at once."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Counts, Event
from outbox_pipelines.errors import SetupError
from tests.conftest import wait_until
from tests.consumer.place import Place, effect, running, uuid7

Connection = psycopg.Connection[Any]


class Batches:
    """Takes them; refuses those with a certain event in them."""

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.sizes: list[int] = []

    def __call__(self, events: list[Event], connection: Connection) -> None:
        self.sizes.append(len(events))
        for event in events:
            effect(event, connection)
        if any(event.payload["n"] == self.refuses for event in events):
            raise ValueError("no such customer")


def run_through(
    place: Place, batches: Batches, effects: int, group: str = "billing", size: int = 50
) -> Counts:
    consumer = place.bare(retry_seconds=300, group=group)
    consumer.on("order.placed", batch=size)(batches)
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted(group) == 0 and place.effects() == effects, what="all effects")
        return run.end()


def out_of_order(place: Place) -> dict[str, list[int]]:
    """What was handled of each key whose events did not come in their order."""
    rows = place.rows("SELECT key, array_agg(n ORDER BY seq) FROM effects GROUP BY key")
    return {key: numbers for key, numbers in rows if numbers != sorted(numbers)}


def test_many_events_are_one_transaction(place: Place) -> None:
    place.load(2000)
    batches = Batches()
    assert run_through(place, batches, 2000) == Counts(handled=2000)
    assert max(batches.sizes) == 50
    assert place.value("SELECT count(DISTINCT xmin::text) FROM effects") == len(batches.sizes)
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == 2000
    assert out_of_order(place) == {}
    again = Batches()
    assert run_through(place, again, 2000, "again") == Counts(duplicates=2000)
    assert again.sizes == []


def test_the_same_event_twice_in_a_batch_is_handled_once(place: Place) -> None:
    """Guards against a duplicate that no record stands between."""
    twice = [str(uuid7()) for _ in range(120)]
    place.send(*(each for each in twice for _ in range(2)), keys=1)
    assert run_through(place, Batches(), 120) == Counts(handled=120, duplicates=120)


@pytest.mark.extended
@pytest.mark.parametrize("how", [{"batch": 50}, {"per_transaction": 50}])
def test_an_event_that_comes_twice_keeps_its_first_place(place: Place, how: dict[str, Any]) -> None:
    """Guards against an event that is handled behind later ones of its aggregate, because it came again."""
    ids = [str(uuid7()) for _ in range(5)]
    place.send(*(ids[n] for n in (0, 1, 2, 1, 3, 0, 4)), keys=1)
    consumer = place.bare()

    @consumer.on("order.placed", **how)
    def handle(given: Any, connection: Connection) -> None:
        for event in given if isinstance(given, list) else [given]:
            effect(event, connection)

    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=5, duplicates=2)
    assert [str(event_id) for (event_id,) in place.rows("SELECT event_id FROM effects ORDER BY seq")] == ids


def test_one_of_a_batch_fails_and_the_others_are_handled(place: Place) -> None:
    """Guards against a poisoned event that takes its neighbours with it."""
    place.load(400, keys=10)
    batches = Batches(refuses=333)
    counts = run_through(place, batches, 400 - 7)
    assert (counts.handled, counts.received, counts.failures) == (393, 7, 1)
    assert place.inbox()["waiting"] == 7
    # Batches that come later do not overtake it.
    place.load(800, first=400, keys=10)
    counts = run_through(place, Batches(), 393 + 720)
    assert (counts.handled, counts.received) == (720, 80)
    assert place.value("SELECT count(*) FROM effects WHERE key = '3'") == 33
    assert out_of_order(place) == {}


@pytest.mark.extended
def test_types_are_distinguished_within_a_batch(place: Place) -> None:
    for _ in range(20):
        place.send(*(uuid7() for _ in range(5)), keys=1)
        place.send(uuid7(), type="order.seen", keys=1)
    seen: list[Event] = []
    batches = Batches()
    consumer = place.bare()
    consumer.on("order.placed", batch=100)(batches)
    consumer.on("order.seen")(lambda event, _: seen.append(event))
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=120)
    assert (place.effects(), len(seen)) == (100, 20)


@pytest.mark.parametrize("size", [0, 10_001])
def test_sizes_out_of_bounds_are_refused(place: Place, size: int) -> None:
    with pytest.raises(SetupError, match="batch is"):
        place.bare().on("order.placed", batch=size)


def test_a_batch_waits_behind_what_another_process_puts_into_the_inbox(place: Place) -> None:
    """Guards against a statement that waits for an event of its batch and handles a later one."""
    first, second = uuid7(), uuid7()
    place.send(first, second, keys=1)
    batches = Batches()
    consumer = place.bare()
    consumer.on("order.placed", batch=50)(batches)
    with psycopg.connect(place.dsn) as other:
        # As a process that has lost the partition and does not know it yet.
        other.execute(
            "INSERT INTO processed_events (event_id, source, bucket) "
            "SELECT %(id)s, 'billing', processed_bucket(%(id)s)",
            {"id": first},
        )
        other.execute(
            """INSERT INTO inbox (message_id, source, topic, partition, "offset", key, event_type, headers,
                sent_at, next_attempt_at)
            VALUES (%s, 'billing', %s, 0, 0, '0', 'order.placed', '[]', now(), now() + interval '1 day')""",
            [first, place.topic],
        )
        waits = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock' AND query LIKE %s"
        )
        with running(consumer) as run:
            wait_until(lambda: place.value(waits, "%processed_events%unnest%") == 1, what="the batch")
            other.commit()
            wait_until(lambda: place.uncommitted() == 0, what="all offsets")
            run.end()
    assert place.effects() == 0
    assert place.rows("SELECT message_id FROM inbox WHERE state = 'waiting' ORDER BY seq") == [
        (first,),
        (second,),
    ]
