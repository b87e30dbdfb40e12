"""Ids that are no UUIDs: what tells an event from another producer's, and from a later one with its id."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Consumer, Counts, Event
from outbox_pipelines.errors import SetupError
from tests.conftest import either, wait_until
from tests.consumer.place import Place, at_work, effect, running, uuid7

Connection = psycopg.Connection[Any]


def counted(place: Place, consumer: Consumer, *others: Place, group: str = "billing") -> Counts:
    """What it counts until the ends of all topics."""
    with running(consumer) as run:
        for each in (place, *others):
            wait_until(
                partial(lambda each: each.left_to(f"{place.topic}-{group}") == 0, each), what="all offsets"
            )
        return run.end()


@pytest.mark.parametrize("batch", either(None, 10))
def test_two_tables_with_serial_ids(place: Place, batch: int | None) -> None:
    """Guards against an event that is lost since another producer has used its number."""
    payments = place.beside("payments")
    for each in (place, payments):
        each.send(1, 2)
    consumer = place.bare(topics=[place.topic, payments.topic])

    @consumer.on("order.placed", batch=batch)
    def handle(events: Any, connection: Connection) -> None:
        for event in events if batch else [events]:
            effect(event, connection)

    assert counted(place, consumer, payments) == Counts(handled=4)
    assert place.effects() == 4


@pytest.mark.extended
def test_keys_of_two_producers(place: Place) -> None:
    payments = place.beside("payments")
    for each in (place, payments, place):
        each.send("7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b001", idempotency_key="request-1")
    consumer = place.consumer(dedupe="key", topics=[place.topic, payments.topic])
    assert counted(place, consumer, payments) == Counts(handled=2, duplicates=1)


@pytest.mark.extended
def test_with_keys_only_the_key_counts(place: Place) -> None:
    """Guards against a documentation that is wrong about reused keys, or a change from keys to ids."""
    place.put('{"n": 1}', id=str(uuid7()), event_type="order.placed", idempotency_key="request-1")
    place.put('{"n": 2}', id=str(uuid7()), event_type="order.placed", idempotency_key="request-1")
    assert counted(place, place.consumer(dedupe="key")) == Counts(handled=1, duplicates=1)
    assert counted(place, place.consumer(group="by id"), group="by id") == Counts(handled=2)


@pytest.mark.parametrize(("told", "handled"), either((True, 2), (False, 4)))
def test_a_topic_that_gets_another_name(place: Place, told: bool, handled: int) -> None:
    """Guards against handling all events that are in both topics: the old name keeps their identities."""
    renamed = place.beside("v2")
    place.send(1, 2)
    renamed.send(1, 2)
    origins = {renamed.topic: place.topic} if told else {}
    consumer = place.consumer(topics=[place.topic, renamed.topic], origins=origins)
    assert counted(place, consumer, renamed) == Counts(handled=handled, duplicates=4 - handled)


def test_a_uuid_is_the_same_event_in_every_topic(place: Place) -> None:
    other = place.beside("v2")
    for each in (place, other):
        each.send("7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b001", "0" * 31 + "1")
    consumer = place.consumer(topics=[place.topic, other.topic])
    assert counted(place, consumer, other) == Counts(handled=3, duplicates=1)


@pytest.mark.parametrize("batch", either(None, 10))
def test_an_id_that_is_used_again_is_a_dead_letter(place: Place, batch: int | None) -> None:
    """Guards against RESTART IDENTITY, after which every event looked like one that was handled."""
    place.send(1, 2, keys=1)
    place.put('{"n":   0}', key="0", id="1", event_type="order.placed", aggregate_type="order")
    place.put('{"n": 77}', key="0", id="1", event_type="order.placed", aggregate_type="order")
    consumer = place.bare()

    @consumer.on("order.placed", batch=batch)
    def handle(events: Any, connection: Connection) -> None:
        for event in events if batch else [events]:
            effect(event, connection)

    assert counted(place, consumer) == Counts(handled=2, duplicates=1, failures=1, dead_letters=1)
    [(state, error, payload)] = place.rows(
        "SELECT state, last_error, payload FROM inbox WHERE state <> 'processed'"
    )
    assert (state, payload) == ("failed", b'{"n": 77}')
    assert "order.placed 1 " in error
    assert "from the event that was handled with this id" in error
    # All of it again: nothing is new, nothing is another dead letter.
    consumer = place.consumer(group="again")
    assert counted(place, consumer, group="again") == Counts(duplicates=4)
    # An operator finds it right: it is handled like any other.
    place.rows("UPDATE inbox SET state = 'waiting', next_attempt_at = now() WHERE state = 'failed'")
    consumer = place.consumer()
    assert consumer.drain(until_empty=True).handled == 1
    assert place.value("SELECT count(*) FROM effects WHERE n = 77") == 1


def test_an_id_that_is_used_again_is_not_received_as_another(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    place.send(1, 1, 1, keys=1)
    with at_work(place.consumer(), "receive") as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        assert run.end() == Counts(received=1, failures=2, dead_letters=2)
    assert place.inbox() == {"waiting": 1, "failed": 2}
    assert "from the event" in caplog.text


def replayed(place: Place, consumer: Consumer) -> Counts:
    """What it counts while it tries all dead letters again."""
    place.rows(
        "UPDATE inbox SET state = 'waiting', attempts = 0, next_attempt_at = now() WHERE state = 'failed'"
    )
    return consumer.drain(until_empty=True)


def reuse(place: Place) -> None:
    """Another event with the id 1."""
    place.put('{"n": 77}', key="0", id="1", event_type="order.placed", aggregate_type="order")


@pytest.mark.extended
@pytest.mark.parametrize("times", [1, 2])
def test_a_reused_id_is_handled_once_after_its_repair(place: Place, times: int) -> None:
    """Guards against a dead letter whose new id is not recorded: it is handled at each delivery."""
    place.send(1)
    assert counted(place, place.consumer()) == Counts(handled=1)
    for _ in range(times):
        reuse(place)
    assert counted(place, place.consumer()).dead_letters == times
    origins = {place.topic: "since May"}
    assert replayed(place, place.consumer(origins=origins)) == Counts(handled=1, duplicates=times - 1)
    reuse(place)
    assert counted(place, place.consumer(origins=origins)) == Counts(duplicates=1)
    assert place.value("SELECT count(*) FROM effects WHERE n = 77") == 1
    assert place.inbox() == {"processed": times}


def unnamed(place: Place, event_id: str) -> None:
    """An event whose id is in a header of another name."""
    place.put('{"n": 1}', event_id=event_id, event_type="order.placed", idempotency_key="request-1")


NAMES = {"id": "event-id"}


@pytest.mark.extended
@pytest.mark.parametrize("dedupe", ["id", "key"])
def test_wrong_header_names_are_handled_once_after_their_repair(place: Place, dedupe: str) -> None:
    """Guards against an event whose id nothing records, as it was unknown when the event came."""
    unnamed(place, str(event_id := uuid7()))
    assert counted(place, place.consumer(dedupe=dedupe)).dead_letters == 1
    consumer = place.consumer(dedupe=dedupe, header_names=NAMES)
    assert replayed(place, consumer) == Counts(handled=1)
    unnamed(place, str(event_id))
    consumer = place.consumer(dedupe=dedupe, header_names=NAMES)
    assert counted(place, consumer) == Counts(duplicates=1)
    assert place.effects() == 1


@pytest.mark.extended
@pytest.mark.parametrize("state", ["waiting", "failed", "discarded"])
def test_a_replayed_message_that_the_inbox_has_under_its_id_is_a_duplicate(place: Place, state: str) -> None:
    """Guards against a message that is handled although the same event waits, or has its own dead letter."""
    unnamed(place, str(event_id := uuid7()))
    assert counted(place, place.consumer()).dead_letters == 1
    unnamed(place, str(event_id))
    place.rows("UPDATE inbox SET state = 'waiting', next_attempt_at = 'infinity'")
    with at_work(place.consumer(header_names=NAMES), "receive") as run:
        wait_until(lambda: place.uncommitted() == 0, what="the second delivery")
        assert run.end() == Counts(received=1)
    place.rows(
        "UPDATE inbox SET state = %s, next_attempt_at = 'infinity' WHERE message_id = %s", state, event_id
    )
    place.rows("UPDATE inbox SET next_attempt_at = now() WHERE message_id <> %s", event_id)
    consumer = place.consumer(header_names=NAMES)
    assert consumer.drain(until_empty=True) == Counts(duplicates=1)
    assert place.rows("SELECT state FROM inbox ORDER BY seq") == [("processed",), (state,)]


@pytest.mark.extended
def test_a_failed_replay_does_not_make_a_message_its_own_duplicate(place: Place) -> None:
    """Guards against a record that stays when the handler fails: the next attempt would skip the event."""
    unnamed(place, str(uuid7()))
    assert counted(place, place.consumer()).dead_letters == 1
    tries: list[str] = []
    consumer = place.bare(header_names=NAMES, retry_seconds=0.01)

    @consumer.on("order.placed")
    def handle(event: Event, connection: Connection) -> None:
        effect(event, connection)
        tries.append(event.id)
        if len(tries) < 3:
            raise ValueError("the first two attempts")

    place.rows("UPDATE inbox SET state = 'waiting', attempts = 0, next_attempt_at = now()")
    with at_work(consumer, "drain") as run:
        wait_until(lambda: place.inbox() == {"processed": 1}, what="the third attempt")
        assert run.end() == Counts(handled=1, failures=2)
    assert place.effects() == 1


def test_the_shape_of_the_value_does_not_matter() -> None:
    """Guards against a change of shape or format that makes dead letters of what comes again."""
    rest: dict[str, Any] = dict.fromkeys(
        ("idempotency_key", "correlation_id", "causation_id", "traceparent", "version", "timestamp")
    )
    rest |= {
        "type": "a",
        "aggregate_type": "b",
        "aggregate_id": "c",
        "topic": "t",
        "partition": 0,
        "offset": 0,
    }
    envelope = (
        b'{"event_id": "1", "event_type": "a", "aggregate_type": "b", "aggregate_id": "c", '
        b'"payload": {"x": 1, "y": 2}, "timestamp": "d"}'
    )
    values = (
        b'{"x":1,"y":2}',
        b'{"y": 2, "x": 1}',
        envelope,
        b'\0\0\0\0\7{"x": 1, "y": 2}',
        b'{"x": 1, "y": 3}',
        b"\xff",
        b"[" * 9000,
        None,
    )
    contents = [Event(id="1", value=value, headers={}, **rest)._content(by_key=False) for value in values]
    assert contents[0] == contents[1] == contents[2] == contents[3]
    assert len(set(contents)) == len(values) - 3
    assert None not in contents


def test_origins_without_a_name_are_refused(place: Place) -> None:
    with pytest.raises(SetupError, match="origins has '' for orders"):
        place.bare(origins={"orders": ""})
