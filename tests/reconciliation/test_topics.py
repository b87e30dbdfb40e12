"""A day's events compared with the messages of the topics."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.conninfo import make_conninfo

from outbox_pipelines.config.rules import Rule
from outbox_pipelines.consumer import Replay
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.reconciliation import messages
from outbox_pipelines.relay.parking.dead_letter_store import ParkedDeadLetters
from tests.conftest import Outbox, may_log_in
from tests.consumer.place import uuid7
from tests.reconciliation.place import DAY, END_MS, START_MS, TODAY, Place, found, new_id, one
from tests.relay.topic import create


def test_a_clean_day_is_equal(place: Place) -> None:
    """Guards against alarms where all is well: other days' events are no phantoms, retries no duplicates."""
    place.write(20, day=DAY - timedelta(1))
    place.write(30)
    place.outbox.write("today")
    place.relay()
    report = place.reconcile()
    assert (report.events, report.messages, report.source) == (30, 51, "table")
    (topics,) = report.sides
    assert (topics.compared, topics.findings) == (30, [])
    assert report.equal
    assert report.notes == []


def test_an_event_that_is_in_no_topic_is_missing(place: Place) -> None:
    """Guards against a loss that goes unnoticed."""
    place.write(5)
    place.relay()
    lost = place.write(2, event_type="order.lost")
    place.pass_over()
    report = place.reconcile()
    missing = one(report.sides[0], "missing")
    assert found(report.sides[0]) == {"missing": 2}
    assert missing.kind.status is Status.ERROR
    assert sorted(str(each.id) for each in missing.examples) == sorted(lost)
    assert {(each.event_type, each.topic) for each in missing.examples} == {("order.lost", place.topic)}
    assert all(each.seq for each in missing.examples)


def test_an_event_that_is_in_another_topic(place: Place) -> None:
    """Guards against exchanged topics that are called all present, and consumers blamed for them."""
    names = {"order.placed": f"{place.topic}-a", "order.paid": f"{place.topic}-b"}
    for topic in names.values():
        create(place.settings.kafka, topic, 1)

    def route(**topics: str) -> Place:
        rules = {name: Rule(topic=topic) for name, topic in topics.items()}
        return replace(place, outbox=Outbox(place.outbox.settings.model_copy(update={"event_types": rules})))

    exchanged = dict(zip(names, reversed(names.values()), strict=True))
    wrong = place.write(4, event_type="order.placed")
    route(**exchanged).relay()
    place.write(3, event_type="order.paid")
    after = route(**names)
    after.relay()
    after.name(topics=[names["order.placed"]])
    report = after.reconcile()
    (of_topics, billing) = report.sides
    assert found(of_topics) == {"wrong_topic": 4}
    assert found(billing) == {}
    finding = one(of_topics, "wrong_topic")
    assert finding.kind.status is Status.ERROR
    assert {each.id for each in finding.examples} == set(wrong)
    assert {(each.topic, each.detail) for each in finding.examples} == {
        (names["order.paid"], f"belongs in {names['order.placed']}")
    }
    # A copy in the right topic: published, and the other one stays wrong.
    after.send(wrong[0], topic=names["order.placed"])
    assert found(after.reconcile().sides[0]) == {"wrong_topic": 4}


def test_what_is_not_published_yet_lags(place: Place) -> None:
    """Guards against a backlog that is taken for a loss."""
    place.write(5)
    place.relay()
    (waits,) = place.write(1)
    report = place.reconcile()
    assert found(report.sides[0]) == {"lagging": 1}
    (example,) = one(report.sides[0], "lagging").examples
    assert (example.id, example.detail) == (waits, "pending")
    assert report.status is Status.WARN


def test_a_message_of_no_event_is_a_phantom(place: Place) -> None:
    place.write(3)
    place.relay()
    stranger = new_id()
    place.send(stranger)
    report = place.reconcile()
    assert found(report.sides[0]) == {"phantom": 1}
    (example,) = one(report.sides[0], "phantom").examples
    assert (example.id, example.topic) == (stranger, place.topic)
    assert example.offset is not None


def test_an_event_whose_id_was_drawn_on_another_day_is_no_phantom(place: Place) -> None:
    """Guards against transactions over midnight, and backfills: the id's time is not the event's."""
    place.write(1, day=DAY - timedelta(1), id=new_id())
    place.write(1, day=DAY + timedelta(1), id=new_id())
    place.write(1, id=str(uuid7(END_MS + 3_600_000)))
    place.write(1, id=str(uuid7(START_MS - 3_600_000)))
    place.write(1, id=str(uuid7()))
    place.relay()
    report = place.reconcile()
    assert report.events == 3
    assert report.sides[0].findings == []


def test_ids_that_tell_no_time_go_by_the_time_of_the_message(place: Place) -> None:
    (known,) = place.write(1, id="7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b001")
    place.write(1, day=DAY - timedelta(1), id="7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b002")
    other, stranger = "7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b002", "7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b003"
    place.pass_over()
    place.send(known, other, stranger, at_ms=START_MS + 1000)
    place.send("7b0f2c3e-1f43-4a5e-9d63-52a3f5a1b004")
    report = place.reconcile()
    assert found(report.sides[0]) == {"phantom": 1}
    assert one(report.sides[0], "phantom").examples[0].id == stranger


def test_an_event_that_came_twice_is_counted_once_too_often(place: Place) -> None:
    ids = place.write(6, keys=1)
    place.relay()
    place.send(ids[1], ids[1], ids[2])
    report = place.reconcile()
    # Their first coming was in order: what comes again changes nothing.
    assert found(report.sides[0]) == {"duplicated": 3}
    duplicated = one(report.sides[0], "duplicated")
    assert duplicated.kind.status is Status.WARN
    assert [(each.id, each.detail) for each in duplicated.examples] == [
        (ids[1], "3 times"),
        (ids[2], "2 times"),
    ]


def test_an_event_behind_a_later_one_of_its_aggregate_is_out_of_order(place: Place) -> None:
    """Guards against orders that are compared across aggregates, which never had one."""
    ids = place.write(4, keys=1)
    others = place.write(2, keys=1, aggregate_id="another")
    place.pass_over()
    # One key, and so one partition.
    place.send(others[1], ids[0], ids[2], ids[1], ids[3], others[0])
    report = place.reconcile()
    late = one(report.sides[0], "out_of_order")
    assert found(report.sides[0]) == {"out_of_order": 2}
    assert [(each.id, each.offset) for each in late.examples] == [(ids[1], 3), (others[0], 5)]
    assert late.examples[0].detail == f"behind seq {(late.examples[0].seq or 0) + 1}"
    assert late.kind.status is Status.ERROR


def test_a_dead_letter_is_not_missing_and_comes_late_when_replayed(place: Place) -> None:
    """Guards against alarms about what an operator did on purpose."""
    dead, given_up, *_ = place.write(6, keys=1)
    place.rows(
        "INSERT INTO outbox_parked SELECT *, 'failed' FROM outbox WHERE id = ANY (%s::uuid[])",
        [dead, given_up],
    )
    with place.outbox.connect() as connection:
        ids = [each.headers["id"] for each in place.messages()]
        assert ids == []
        rest = connection.execute(
            "SELECT id::text FROM outbox WHERE id NOT IN (SELECT id FROM outbox_parked) ORDER BY seq"
        ).fetchall()
    place.pass_over()
    place.send(*(event_id for (event_id,) in rest))
    report = place.reconcile()
    assert found(report.sides[0]) == {"dead_letters": 2}
    assert report.equal
    assert "topics: 4 compared, all present" in report.lines()
    act = {"actor": "alice", "reason": "mended"}
    ParkedDeadLetters(place.settings).act("discard", {"ids": [given_up]}, **act)
    ParkedDeadLetters(place.settings).act("replay", {"ids": [dead]}, **act)
    assert found(place.reconcile().sides[0]) == {"lagging": 1, "discarded": 1}
    place.relay()
    report = place.reconcile()
    assert found(report.sides[0]) == {"late_replays": 1, "discarded": 1}
    assert report.equal


def test_messages_without_an_id_are_unreadable(place: Place) -> None:
    place.write(2)
    place.relay()
    place.send("order-1", "", at_ms=START_MS + 1000)
    # Of another day's time: that day's to tell.
    place.send("order-2")
    report = place.reconcile()
    assert found(report.sides[0]) == {"unreadable": 2}


@pytest.mark.extended
def test_other_names_of_headers_are_read(place: Place) -> None:
    place.write(3)
    named = place.settings.model_copy(update={"header_names": "id=event-id"})
    renamed = Place(Outbox(named), place.directory)
    renamed.relay()
    assert renamed.reconcile().equal
    assert found(place.reconcile().sides[0]) == {"missing": 3}


@pytest.mark.extended
def test_in_exactly_once_ends_of_transactions_are_no_messages(place: Place) -> None:
    """Guards against a reader that waits for an offset at which no message is."""
    place.write(5)
    exactly = place.settings.model_copy(update={"delivery": "exactly_once"})
    Place(Outbox(exactly), place.directory).relay()
    report = place.reconcile()
    assert (report.messages, report.equal) == (5, True)


def test_the_rights_of_an_operator_suffice(place: Place) -> None:
    """Guards against a question that only the owner of the outbox can ask."""
    place.write(3)
    place.relay()
    place.send(new_id())
    role = f"role_{uuid4().hex[:12]}"
    place.rows(f"CREATE ROLE {role} {may_log_in(place.settings.dsn)}")
    try:
        place.rows("SELECT outbox_grant_operator(%s)", role)
        dsn = make_conninfo(place.settings.dsn, user=role)
        operator = Outbox(place.settings.model_copy(update={"dsn": dsn}))
        assert found(Place(operator, place.directory).reconcile().sides[0]) == {"phantom": 1}
    finally:
        place.rows(f"DROP OWNED BY {role}")
        place.rows(f"DROP ROLE {role}")


@pytest.mark.extended
def test_what_is_published_while_reading_is_no_phantom(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against alarms while a relay runs: messages whose events were written after the reading."""
    place.write(2)
    place.relay()
    find = messages.find

    def find_later(*given: Any) -> Any:
        place.write(2)
        place.relay()
        return find(*given)

    monkeypatch.setattr(messages, "find", find_later)
    report = place.reconcile()
    assert (report.events, report.messages, report.equal) == (2, 4, True)


def test_today_is_reconciled_as_it_stands(place: Place) -> None:
    place.outbox.write(1, 2, 3)
    place.relay()
    report = place.reconcile(TODAY)
    assert report.notes == ["the day is not over: the result is preliminary"]
    assert (report.events, report.equal) == (3, True)


@pytest.mark.extended
def test_a_replay_is_no_duplicate_and_not_out_of_order(place: Place) -> None:
    """Guards against findings about every replay, in its topic and in what its consumers have recorded."""
    ids = place.write(4, keys=1)
    place.relay()
    place.consumer()
    replay = uuid7(START_MS + 1)
    marks: dict[str, Any] = {"replay-id": str(replay), "replayed-at": "2026-11-27T10:00:00+00:00"}
    place.send(*ids[:2], **marks)
    place.rows(
        "INSERT INTO processed_events (event_id, bucket, source, content) "
        "SELECT %s::uuid, processed_bucket(%s::uuid), 'billing', %s::uuid",
        *[str(Replay(replay, datetime.now(UTC))._identity(UUID(ids[0])))] * 2,
        str(replay),
    )
    report = place.reconcile()
    assert report.messages == 6
    assert [found(side) for side in report.sides] == [{}, {}]
