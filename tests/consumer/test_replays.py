"""Replayed events: skipped or handled as their handler says, once per replay, apart from their originals."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from outbox_pipelines.consumer import Consumer, Counts, Event, Replay, administration
from outbox_pipelines.consumer.testing import handle, make_event
from outbox_pipelines.errors import SetupError
from tests.conftest import either, wait_until
from tests.consumer.place import Place, effect, running, uuid7
from tests.consumer.test_identity import counted
from tests.schema.servers import Database

Connection = psycopg.Connection[Any]
AT = "2026-11-27T10:00:00+00:00"
ID = "7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b001"


def marked(replay: object) -> dict[str, str]:
    return {"replay_id": str(replay), "replayed_at": AT}


def taking(place: Place, replays: Any, batch: int | None = None) -> Consumer:
    """A consumer whose handler takes replays in this way."""
    consumer: Any = place.bare()

    @consumer.on("order.placed", batch=batch, replays=replays)  # type: ignore[untyped-decorator]
    def placed(events: Any, connection: Connection) -> None:
        for event in events if batch else [events]:
            effect(event, connection)

    return cast(Consumer, consumer)


def test_a_replay_is_skipped_unless_a_handler_asks_for_it(place: Place) -> None:
    """Guards against side effects that happen again, and against a replay that is skipped in silence."""
    place.put('{"n": 1}', id=ID, event_type="order.placed", **marked(uuid7()))
    place.put('{"n": 2}', id=str(uuid7()), event_type="order.unknown", **marked(uuid7()))
    assert counted(place, place.consumer()) == Counts(skipped_replays=2)
    assert place.processed() == 0


@pytest.mark.parametrize("batch", either(None, 10))
def test_a_replay_is_handled_once_and_apart_from_its_original(place: Place, batch: int | None) -> None:
    """Guards against a replay that makes the original count as handled, or is handled twice."""
    first, second = uuid7(), uuid.uuid4()
    for more in (marked(first), {}, marked(first), {}, marked(second)):
        place.put('{"n": 1}', id=ID, event_type="order.placed", **more)
    assert counted(place, taking(place, "handle", batch)) == Counts(handled=3, duplicates=2)
    assert place.effects() == 3
    # The record of a replay goes with those of the replay's day, and says which replay it was.
    query = "SELECT content::text, bucket = processed_bucket(%s) FROM processed_events ORDER BY content"
    assert set(place.rows(query, first)) == {(None, False), (str(first), True), (str(second), False)}


@pytest.mark.extended
def test_only_replays(place: Place) -> None:
    """Guards against a rebuilding consumer that handles what is new, too."""
    place.put('{"n": 1}', id=ID, event_type="order.placed")
    place.put('{"n": 1}', id=ID, event_type="order.placed", **marked(uuid7()))
    assert counted(place, taking(place, "only")) == Counts(handled=1, ignored=1)


@pytest.mark.extended
def test_a_number_that_is_used_again_is_found_in_a_replay(place: Place) -> None:
    """Guards against an event that is lost from a replay since it shares its number with another one."""
    more = {"event_type": "order.placed", "aggregate_type": "order", **marked(uuid7())}
    for n in (1, 1, 2):
        place.put(f'{{"n": {n}}}', id="7", **more)
    counts = counted(place, taking(place, "handle"))
    assert counts == Counts(handled=1, duplicates=1, failures=1, dead_letters=1)


@pytest.mark.extended
def test_a_failed_replay_is_a_dead_letter_that_names_it(place: Place) -> None:
    """Guards against an operator who replays a dead letter and does not see what it comes from."""
    replay = uuid7()
    healed = False
    consumer = place.bare(max_attempts=1, outage_after=0)

    @consumer.on("order.placed", replays="handle")
    def placed(event: Event, connection: Connection) -> None:
        if not healed:
            raise ValueError("not yet")
        assert event.replay == Replay(replay, datetime.fromisoformat(AT))
        effect(event, connection)

    place.put('{"n": 1}', id=ID, event_type="order.placed", **marked(replay))
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"failed": 1}, what="a dead letter")
        with psycopg.connect(place.dsn) as connection:
            letters = administration.ConsumerDeadLetters(connection)
            (row,) = letters.find({}).rows
            (shown,) = letters.show(uuid.UUID(row.id))
            assert row.replay == shown["replay"] == str(replay)
            listed = Database(place.dsn, Path()).outbox("consumer", "dead-letters", "list")
            assert f"replay {replay}" in listed.output
            healed = True
            letters.act("replay", {}, actor="me", reason="healed")
        wait_until(lambda: place.effects() == 1, what="an effect")
        run.end()
    assert place.inbox() == {"processed": 1}


@pytest.mark.extended
@pytest.mark.parametrize("more", [{"replay_id": "7"}, {"replay_id": str(uuid7())}, marked("")])
def test_a_mark_that_cannot_be_read_is_a_dead_letter(place: Place, more: dict[str, str]) -> None:
    """Guards against a replay that counts as new since its mark is damaged."""
    place.put('{"n": 1}', id=ID, event_type="order.placed", **more)
    assert counted(place, place.consumer()) == Counts(failures=1, dead_letters=1)
    assert "header replay-id is not a UUID" in place.value("SELECT last_error FROM inbox")


def test_a_handler_of_replays_in_an_applications_test(place: Place) -> None:
    """Guards against handlers whose way with replays cannot be tested."""
    consumer = taking(place, "handle")
    event = make_event("order.placed", {"n": 1}, replay=Replay(uuid7(), datetime.now(UTC)))
    with psycopg.connect(place.dsn) as connection:
        assert handle(consumer, event, using=connection) == ["handled"]
        assert handle(consumer, event, using=connection) == ["duplicate"]
        assert handle(place.consumer(), event, using=connection) == ["ignored"]
        connection.rollback()


def test_another_word_is_refused(place: Place) -> None:
    """Guards against a misspelled word that lets replays through, or drops them."""
    with pytest.raises(SetupError, match="replays is 'never': give skip or handle or only"):
        taking(place, "never")
    with pytest.raises(SetupError, match="replays is 'never'"):
        place.bare().on_other(replays="never")  # type: ignore[call-overload]
