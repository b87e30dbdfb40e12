"""Refusals: the refused event is found and parked with its aggregate alone; all others flow (G3, G4)."""

from __future__ import annotations

import json
import math
import threading
import time
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from outbox_pipelines.relay import service
from outbox_pipelines.relay.core.blocked import MOMENT_SECONDS, BlockedAggregates
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.writer import emit
from tests.conftest import EITHER_DELIVERY, Outbox, read_topic, wait_until
from tests.kafka_clients import Consumer
from tests.relay.parked import keys, numbers, numbers_by_key, parked_rows, write
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import NOISE, change_topic, create_topic


def _drain(outbox: Outbox, **more: object) -> Totals:
    return service.relay(quick(outbox, **more), until_empty=True)


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that may not ask for the topics' limits: it learns of them by refusals."""
    monkeypatch.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)


def test_only_the_guilty_aggregate_waits(outbox: Outbox) -> None:
    """Guards against a rejected event that stops the relay, is skipped, or is overtaken (G3)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    before = [("a", {"n": 0}), ("b", {"n": 0})]
    after = [("a", {"n": 2}), ("b", {"n": 1}), ("c", {"n": 0})]
    ids = write(outbox, *before, ("a", {"n": 1, "noise": NOISE}), *after)
    totals = _drain(outbox, retry_seconds=60)
    assert sorted(keys(outbox)) == ["a", "b", "b", "c"]
    assert numbers_by_key(outbox.messages())["b"] == [0, 1]
    assert parked_rows(outbox) == [("a", ids[2], "retrying", 1), ("a", ids[3], "waiting", 0)]
    assert totals.events == 4
    write(outbox, ("a", {"n": 3}), ("b", {"n": 2}))
    _drain(outbox, retry_seconds=60)
    assert sorted(keys(outbox)) == ["a", "b", "b", "b", "c"]
    assert numbers_by_key(outbox.messages())["b"] == [0, 1, 2]
    assert [row[2] for row in parked_rows(outbox)] == ["retrying", "waiting", "waiting"]


@pytest.mark.usefixtures("unasked")
def test_innocents_of_a_refused_batch_are_neither_counted_nor_lost(outbox: Outbox) -> None:
    """Guards against blaming all events of a batch for one (G3, G4)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    events: list[tuple[str, Any]] = [(str(n % 7), {"n": n}) for n in range(300)]
    events.insert(150, ("guilty", {"n": -1, "noise": NOISE}))
    ids = write(outbox, *events)
    _drain(outbox, retry_seconds=60)
    assert parked_rows(outbox) == [("guilty", ids[150], "retrying", 1)]
    assert len(outbox.messages()) == 300
    numbers = numbers_by_key(outbox.messages())
    for key in range(7):
        assert numbers[str(key)] == [n for n in range(300) if n % 7 == key]


@pytest.mark.usefixtures("unasked")
def test_several_guilty_events_among_many(outbox: Outbox) -> None:
    """Guards against an isolation that loses, duplicates or reorders the other events in flight."""
    create_topic(outbox, 4, **{"max.message.bytes": "2000"})
    guilty = {100, 1500, 1501, 2800}
    events = [(str(n % 50), {"n": n, "noise": NOISE} if n in guilty else {"n": n}) for n in range(3_000)]
    write(outbox, *events)
    with running(quick(outbox, max_attempts=2)):
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed"] * 4, what="4 dead letters")
        wait_until(lambda: len(outbox.messages()) == 3_000 - 4, what="all others")
    numbers = numbers_by_key(outbox.messages())
    for key in range(50):
        expected = [n for n in range(3_000) if n % 50 == key and n not in guilty]
        assert numbers[str(key)] == expected


def test_a_dead_letter_lets_its_aggregate_go_on(outbox: Outbox) -> None:
    """Guards against an aggregate that is blocked forever, and an attempt more or less than configured."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    ids = write(outbox, ("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 5)])
    with running(quick(outbox, max_attempts=3)):
        wait_until(lambda: numbers(outbox, "a") == [1, 2, 3, 4], what="the aggregate to go on")
        # The others are settled after they can be read.
        failed = [("a", ids[0], "failed", 3)]
        wait_until(lambda: parked_rows(outbox) == failed, what="the dead letter alone")
        write(outbox, ("a", {"n": 5}))
        wait_until(lambda: numbers(outbox, "a") == [1, 2, 3, 4, 5], what="the aggregate to be free")
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT status, retry_count, processed_at IS NULL FROM outbox_events ORDER BY seq"
        ).fetchall()
    assert rows == [("FAILED", 3, True)] + [("PROCESSED", 0, False)] * 5


def test_a_dead_letter_may_block_its_aggregate(outbox: Outbox) -> None:
    """Guards against an aggregate that goes on past a dead letter although the operator said block."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    settings = quick(outbox, max_attempts=1, on_dead_letter="block")
    write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}), ("b", {"n": 0}))
    with running(settings):
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed", "waiting"])
        write(outbox, ("a", {"n": 2}), ("b", {"n": 1}))
        wait_until(lambda: numbers(outbox, "b") == [0, 1])
        assert numbers(outbox, "a") == []
    with running(settings):
        write(outbox, ("a", {"n": 3}), ("b", {"n": 2}))
        wait_until(lambda: numbers(outbox, "b") == [0, 1, 2])
        assert numbers(outbox, "a") == []
    assert [row[2] for row in parked_rows(outbox)] == ["failed", "waiting", "waiting", "waiting"]


def test_a_corrected_topic_accepts_the_event(outbox: Outbox) -> None:
    """Guards against a retry that never comes, or lets later events of the aggregate go first (G2)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0}), ("a", {"n": 1, "noise": NOISE}), ("a", {"n": 2}), ("b", {"n": 0}))
    with running(quick(outbox, max_attempts=1000)):
        wait_until(lambda: len(parked_rows(outbox)) == 2 and parked_rows(outbox)[0][3] > 1)
        change_topic(outbox, **{"max.message.bytes": "2000000"})
        wait_until(lambda: numbers(outbox, "a") == [0, 1, 2], what="the event and those behind it")
        write(outbox, ("a", {"n": 3}))
        wait_until(lambda: numbers(outbox, "a") == [0, 1, 2, 3])
    assert parked_rows(outbox) == []
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT status, retry_count > 0, processed_at >= created_at FROM outbox_events "
            "WHERE aggregate_id = 'a' ORDER BY seq"
        ).fetchall()
    assert rows == [("PROCESSED", n == 1, True) for n in range(4)]


def test_a_type_that_makes_no_topic_name_is_parked(outbox: Outbox) -> None:
    """Guards against one deployment with a bad name that stops everybody's events."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "or/der", 1, "order.placed", {"n": 0})
        emit(connection, "order", 2, "order.placed", {"n": 1})
    _drain(outbox, max_attempts=1)
    assert keys(outbox) == ["2"]
    with outbox.connect() as connection:
        row = connection.execute("SELECT state, attempts, last_error FROM outbox_parked").fetchone()
    assert row is not None
    assert row[:2] == ("failed", 1)
    assert "not a topic name" in row[2]


def test_attempts_wait_longer_and_longer(outbox: Outbox) -> None:
    """Guards against a busy loop around a poisoned event."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}))
    pauses = []
    for attempts in range(1, 8):
        _drain(outbox, retry_seconds=10, max_attempts=100)
        with outbox.connect() as connection:
            row = connection.execute(
                "SELECT attempts, extract(epoch FROM next_attempt_at - clock_timestamp())::float8 "
                "FROM outbox_parked"
            ).fetchone()
            assert row is not None
            assert row[0] == attempts
            pauses.append(row[1])
            connection.execute("UPDATE outbox_parked SET next_attempt_at = clock_timestamp()")
    for pause, expected in zip(pauses, [10, 20, 40, 80, 160, 300, 300], strict=True):
        assert 0.75 * expected < pause < 1.2 * expected


@pytest.mark.extended
def test_a_retry_does_not_wait_for_a_clock_that_went_back(outbox: Outbox) -> None:
    """Guards against an event that is tried again when the clock of the database has caught up."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}))
    _drain(outbox, retry_seconds=10, max_attempts=100)
    for attempts in (2, 3):
        with outbox.connect() as connection:
            connection.execute(
                "UPDATE outbox_parked SET next_attempt_at = clock_timestamp() + interval '1 h'"
            )
        _drain(outbox, retry_seconds=10, max_attempts=100)
        assert [row[3] for row in parked_rows(outbox)] == [attempts]


def test_a_blocked_aggregate_stays_blocked_over_a_restart(outbox: Outbox) -> None:
    """Guards against a relay that forgets who waits, and lets later events pass (G2)."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
    _drain(outbox, retry_seconds=60)
    write(outbox, ("a", {"n": 2}), ("b", {"n": 0}))
    _drain(outbox, retry_seconds=60)
    assert keys(outbox) == ["b"]
    assert [row[2] for row in parked_rows(outbox)] == ["retrying", "waiting", "waiting"]


def test_a_dead_letter_is_copied_to_itscreate_topic(outbox: Outbox) -> None:
    """Guards against consumers that never learn what they miss."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    ids = write(outbox, ("a", {"n": 0, "noise": NOISE[:2000]}))
    _drain(outbox, max_attempts=1, dead_letter_topics=True)
    (copy,) = read_topic(outbox.settings.kafka, f"{outbox.topic()}.dlq")
    assert copy.key == "a"
    assert copy.value is not None
    assert json.loads(copy.value)["n"] == 0
    assert copy.headers["id"] == ids[0]
    assert copy.headers["dead-letter-topic"] == outbox.topic()
    assert copy.headers["dead-letter-attempts"] == "1"
    assert "MSG_SIZE_TOO_LARGE" in str(copy.headers["dead-letter-reason"])


def test_the_operators_command_hears_of_a_dead_letter(outbox: Outbox, tmp_path: Any) -> None:
    """Guards against a dead letter that is not reported."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    ids = write(outbox, ("a", {"n": 0, "noise": NOISE}))
    heard = tmp_path / "heard"
    _drain(outbox, max_attempts=1, dead_letter_command=f"cat > {heard}.new && mv {heard}.new {heard}")
    wait_until(heard.exists)
    shown = json.loads(heard.read_text())
    assert (shown["kind"], shown["id"], shown["attempts"]) == ("dead-letter", ids[0], 1)


def test_a_command_that_fails_harms_nothing(outbox: Outbox) -> None:
    """Guards against an alarm that stops the relay."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), ("b", {"n": 0}))
    _drain(outbox, max_attempts=1, dead_letter_command="exit 3")
    assert keys(outbox) == ["b"]
    assert [row[2] for row in parked_rows(outbox)] == ["failed"]


@pytest.mark.extended
def test_a_long_queue_behind_a_poisoned_event_comes_in_order(outbox: Outbox) -> None:
    """Guards against runs of released events that overtake each other, or get lost between two runs."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), *[("a", {"n": n}) for n in range(1, 12_001)])
    with running(quick(outbox, max_attempts=3)):
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed"], seconds=60)
    assert numbers(outbox, "a") == list(range(1, 12_001))


def test_a_defect_in_the_prober_ends_the_relay(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against parked events that are no longer tried, without a report."""
    create_topic(outbox, **{"max.message.bytes": "10000"})
    write(outbox, ("large", NOISE))

    def broken(self: Prober) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Prober, "_flush", broken)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        _drain(outbox)
    monkeypatch.undo()
    change_topic(outbox, **{"max.message.bytes": "1000000"})
    assert _drain(outbox).events == 1


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_a_stop_while_a_parked_event_is_published(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, delivery: str
) -> None:
    """Guards against a successor that publishes again what was published while the relay was stopping."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("a", {"n": 0, "noise": NOISE}), ("a", {"n": 1}))
    _drain(outbox, delivery=delivery)
    change_topic(outbox, **{"max.message.bytes": "1000000"})
    stop = threading.Event()

    def stopped(self: Prober) -> None:
        stop.set()
        wait_until(lambda: self._end_at < math.inf, what="the relay to end")
        flush(self)

    flush = Prober._flush
    monkeypatch.setattr(Prober, "_flush", stopped)
    service.relay(quick(outbox, delivery=delivery), stop=stop)
    monkeypatch.undo()
    assert [row[2] for row in parked_rows(outbox)][-1:] == ["waiting"]
    _drain(outbox, delivery=delivery)
    assert numbers(outbox, "a") == [0, 1]


def test_what_goes_on_in_a_moment_is_not_settled() -> None:
    """Guards against a run until empty that ends while an event waits for a large one to be published."""
    blocked = BlockedAggregates(time.monotonic)
    blocked.load([("order", "a")])
    (aggregate,) = blocked.due(1)
    blocked.schedule(aggregate, MOMENT_SECONDS)
    assert not blocked.is_settled
    blocked.schedule(aggregate, 60)
    assert blocked.is_settled


def test_others_go_on_while_the_settling_part_is_busy(outbox: Outbox) -> None:
    """Guards against a round of retries that stops all other events, which come in many small batches."""
    create_topic(outbox)
    consumer = Consumer({"bootstrap.servers": outbox.settings.kafka, "group.id": "none"})
    place = TopicPartition(outbox.topic(), 0)

    def has_come(events: int) -> bool:
        return consumer.get_watermark_offsets(place, timeout=60) == (0, events)

    with running(quick(outbox)), outbox.connect(autocommit=False) as busy:
        outbox.write("first")
        wait_until_relayed(outbox)
        # A settle waits for this, as it waits for the thread that reads parked events.
        busy.execute("SELECT FROM outbox_shards FOR UPDATE")
        for n in range(2, 52):
            outbox.write(n)
            wait_until(lambda: has_come(n), what="it is published")  # noqa: B023
    consumer.close()
