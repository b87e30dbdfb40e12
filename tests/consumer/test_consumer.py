"""Events are handled once, whatever comes twice, dies or moves."""

from __future__ import annotations

import signal
import subprocess
import sys

import psycopg
import pytest

from outbox_pipelines.consumer import Counts
from outbox_pipelines.relay import service
from tests import forks
from tests.conftest import Outbox, clean_environment, either, wait_until
from tests.consumer.place import STATIC, Place, Run, running, uuid7


def ids(count: int) -> list[str]:
    return [str(uuid7()) for _ in range(count)]


def start(place: Place, dies_at: str) -> subprocess.Popen[str]:
    return forks.Popen(
        [sys.executable, "-m", "tests.consumer.service", place.dsn, place.kafka, place.topic, dies_at],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_events_that_come_twice_have_their_effects_once(place: Place, outbox: Outbox) -> None:
    """Guards against a replay that charges a customer twice: the relay's own events, read by two groups."""
    outbox.fill(100)
    service.relay(outbox.settings, until_empty=True)
    there = Place(place.dsn, place.kafka, outbox.topic())
    with running(there.consumer()) as first:
        wait_until(lambda: place.effects() == 100, what="100 effects")
        assert first.end() == Counts(handled=100)
    with running(there.consumer(group="again")) as second:
        wait_until(lambda: there.uncommitted("again") == 0, what="the end of the topic")
        assert second.end() == Counts(duplicates=100)
    assert place.effects() == place.processed() == 100


@pytest.mark.parametrize(("dies_at", "known"), either(("commit", 5), ("handler", 4)))
def test_a_kill_neither_loses_nor_doubles(place: Place, dies_at: str, known: int) -> None:
    """Guards against an effect without its record, a record without its effect, or an offset before both."""
    place.load(20)
    process = start(place, dies_at)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, errors
    wait_until(
        lambda: (
            place.value(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name ~ '^consumer'"
            )
            == 0
        )
    )
    assert place.effects() == known
    # The event in progress may have been received before it was handled.
    assert place.processed() - known == place.inbox().get("waiting", 0)
    with running(place.consumer(kafka=STATIC)) as run:
        wait_until(lambda: place.effects() == 20, what="all effects")
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        counts = run.end()
    assert counts.handled == 20 - known
    # It may have committed the offsets of the first ones, never that of the last.
    assert (dies_at == "commit") <= counts.duplicates <= known
    assert place.effects() == place.value("SELECT count(DISTINCT event_id) FROM effects") == 20


@pytest.mark.extended
def test_members_that_come_and_go_hand_over_between_events(place: Place) -> None:
    """Guards against events handled by two, or by none, or out of order, while partitions move under load."""
    written = 0

    def all_at_work() -> bool:
        nonlocal written
        if written - place.effects() < 300:
            place.load(300, first=written)
            written += 300
        return bool(place.value("SELECT count(DISTINCT by) FROM effects") == len(runs))

    runs: list[Run] = []
    try:
        for _ in range(4):
            runs.append(Run(place.consumer()))
            wait_until(all_at_work, seconds=30, what=f"{len(runs)} members at work")
        runs[0].stop.set()
        wait_until(lambda: place.effects() >= written, seconds=60, what="all effects")
    finally:
        counts = [run.end() for run in runs]
    assert place.uncommitted() == 0
    # A member that goes has committed all offsets of what it handled: nothing even came twice.
    assert (sum(each.handled for each in counts), sum(each.duplicates for each in counts)) == (written, 0)
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == place.effects() == written
    for (order,) in place.rows("SELECT array_agg(n ORDER BY seq) FROM effects GROUP BY key"):
        assert order == sorted(order)


def test_a_kill_while_partitions_move_neither_loses_nor_doubles(place: Place) -> None:
    """Guards against events of a partition that was about to go, lost or handled by two, with its member."""
    loaded = 1500
    place.load(loaded)
    dying = start(place, "never")
    wait_until(lambda: place.effects() >= 50, what="some effects")
    newcomers = [Run(place.consumer()) for _ in range(2)]

    def have_moved() -> bool:
        nonlocal loaded
        if place.effects() > loaded - 500:
            # However long the group takes: there is something to move for.
            place.load(500, first=loaded)
            loaded += 500
        return bool(place.value("SELECT count(DISTINCT by) FROM effects") > 1)

    try:
        wait_until(have_moved, seconds=60, what="partitions that move")
        dying.kill()
        dying.communicate(timeout=600)
        wait_until(lambda: place.effects() == loaded, seconds=60, what="all effects")
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
    finally:
        for each in newcomers:
            each.end()
    assert place.value("SELECT count(DISTINCT event_id) FROM effects") == place.effects() == loaded
    for (order,) in place.rows("SELECT array_agg(n ORDER BY seq) FROM effects GROUP BY key"):
        assert order == sorted(order)


def test_two_sources_handle_the_same_events_each_once(place: Place) -> None:
    """Guards against a record that one consumer leaves and another takes for its own."""
    place.send(*ids(10))
    with running(place.consumer("billing")) as billing, running(place.consumer("shipping")) as shipping:
        wait_until(lambda: place.effects() == 20, what="effects of both")
        assert billing.end() == shipping.end() == Counts(handled=10)
    assert place.processed("billing") == place.processed("shipping") == 10


def test_a_stop_within_a_backlog_finishes_one_event_and_leaves_the_others(place: Place) -> None:
    """Guards against events that were fetched but not handled, and count as handled."""
    place.load(500)
    with running(place.consumer()) as first:
        wait_until(lambda: place.effects() >= 20, what="some effects")
        handled = first.end().handled
    assert 20 <= handled < 500
    assert place.effects() == handled
    assert place.uncommitted() == 500 - handled
    with running(place.consumer()) as second:
        wait_until(lambda: place.effects() == 500, what="all effects")
        assert second.end() == Counts(handled=500 - handled)


def test_sigterm_ends_it_in_order(place: Place) -> None:
    """Guards against a deployment that ends each consumer in the middle of an event."""
    place.load(2000)
    process = start(place, "never")
    wait_until(lambda: place.effects() >= 50, what="some effects")
    process.terminate()
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    handled = place.effects()
    assert output == f"{Counts(handled=handled)}\n"
    assert place.uncommitted() == 2000 - handled


def test_the_same_event_in_progress_elsewhere_is_waited_for(place: Place) -> None:
    """Guards against two that look at once, find nothing, and both handle the event."""
    [event_id] = place.send(uuid7())
    with psycopg.connect(place.dsn) as other:
        other.execute(
            "INSERT INTO processed_events (event_id, source, bucket) VALUES (%s, 'billing', "
            "processed_bucket(%s))",
            [event_id, event_id],
        )
        with running(place.consumer()) as run:
            wait_until(
                lambda: place.value(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
                ),
                what="a consumer that waits",
            )
            assert place.effects() == 0
            other.commit()
            wait_until(lambda: place.uncommitted() == 0, what="its offset")
            assert run.end() == Counts(duplicates=1)
    assert place.effects() == 0


def test_types_without_a_handler_cost_no_row(place: Place) -> None:
    """Guards against a topic of many types in which unhandled events fill the table or stop the consumer."""
    place.send(*ids(3), type="order.seen")
    place.send(*ids(2))
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=2, ignored=3)
    assert place.processed() == 2


def test_all_other_types_can_be_asked_for(place: Place) -> None:
    place.send(*ids(3), type="order.seen")
    place.send(*ids(2))
    consumer = place.consumer()
    seen: list[str] = []
    consumer.on_other(lambda event, _: seen.append(event.type))
    with running(consumer) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=5)
    assert seen == ["order.seen"] * 3


def test_ids_of_any_kind_are_distinguished(place: Place) -> None:
    """Guards against other producers' ids, which tell no time or are no UUIDs."""
    various = [*ids(2), "order-1", "order-2", "7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b001"]
    place.send(*various)
    place.send(*various, *(event_id.upper() for event_id in various if "order" not in event_id))
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(handled=5, duplicates=8)
