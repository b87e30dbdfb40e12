"""What cannot be determined, because topics and tables do not keep everything permanently."""

from __future__ import annotations

from datetime import timedelta

import pytest
from confluent_kafka import TopicPartition

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.partitions import close
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.reconciliation import messages
from outbox_pipelines.reconciliation import steps as days
from outbox_pipelines.relay.parking.dead_letter_store import ParkedDeadLetters
from tests import kafka_clients
from tests.conftest import Outbox
from tests.kafka_clients import AdminClient
from tests.reconciliation.place import DAY, START_MS, Place, found, new_id, one
from tests.relay.topic import change_topic


def _delete(place: Place, partition: int, upto: int) -> None:
    """What a topic's retention does."""
    admin = AdminClient({"bootstrap.servers": place.settings.kafka})
    for deleted in admin.delete_records([TopicPartition(place.topic, partition, upto)]).values():
        deleted.result(600)


def _drop(place: Place) -> None:
    (closing,) = close.close(place.settings, DAY)
    assert closing.closed, closing.why_not
    archive.archive(place.settings, DAY)
    assert drop.drop(place.settings, DAY, early=True).now


def test_what_the_topic_has_deleted_is_unknown(place: Place) -> None:
    """Guards against a day that is reported lost when its messages have only grown old."""
    ids = place.write(4, keys=1)
    place.pass_over()
    place.send(*ids[:2], at_ms=START_MS + 600)
    place.send(*ids[2:], at_ms=START_MS + 60_000)
    (message, *_) = place.messages()
    _delete(place, message.partition, 2)
    report = place.reconcile()
    unknowable = one(report.sides[0], "unknowable")
    assert found(report.sides[0]) == {"unknowable": 2}
    assert unknowable.kind.status is Status.WARN
    assert [each.id for each in unknowable.examples] == ids[:2]
    assert str(unknowable.examples[0].detail) == f"the topic has messages since {DAY} 00:01:00"
    assert report.notes == [f"topic {place.topic} has messages since {DAY} 00:01:00"]
    # One that was written since then is missing all the same.
    place.write(1, created_at=f"{DAY} 12:00:00+00")
    place.pass_over()
    assert found(place.reconcile().sides[0]) == {"missing": 1, "unknowable": 2}


def test_a_compacted_topic_is_no_proof(place: Place) -> None:
    place.write(3)
    place.pass_over()
    assert found(place.reconcile().sides[0]) == {"missing": 3}
    change_topic(place.outbox, **{"cleanup.policy": "compact"})
    report = place.reconcile()
    assert found(report.sides[0]) == {"unknowable": 3}
    assert report.notes == [f"topic {place.topic}: the topic is compacted"]


@pytest.mark.extended
def test_what_a_transaction_holds_back_is_not_missing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a producer that crashed in a transaction, and events behind it that count as lost."""
    monkeypatch.setattr(messages, "_HELD_SECONDS", -10.0)
    held = place.settings.model_copy(update={"transaction_seconds": 1.0})
    ids = place.write(2, keys=1)
    place.pass_over()
    producer = kafka_clients.Producer(
        {
            "bootstrap.servers": place.settings.kafka,
            "transactional.id": place.topic,
            "partitioner": "murmur2_random",
        }
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(place.topic, "{}", key="0", headers=[("id", new_id())])
    producer.flush(20)
    place.send(*ids)
    at = Place(Outbox(held), place.directory)
    report = at.reconcile()
    assert found(report.sides[0]) == {"unknowable": 2}
    assert report.notes == [
        f"topic {place.topic}: an open transaction delays the end of the topic",
    ]
    producer.abort_transaction(20)
    assert at.reconcile().equal


def test_a_topic_that_is_gone_has_lost_all(place: Place) -> None:
    place.write(2)
    place.pass_over()
    place.write(1, aggregate_type="parcel")
    place.pass_over()
    report = place.reconcile()
    assert found(report.sides[0]) == {"missing": 3}
    assert report.notes == [f"topic {place.outbox.topic('parcel')} does not exist"]


@pytest.mark.extended
def test_a_dropped_day_is_read_in_the_archive(place: Place) -> None:
    """Guards against days that can be asked about for a month only; and against dead letters of the file that
    were resolved since."""
    ids = place.write(6, keys=1)
    place.rows("INSERT INTO outbox_parked SELECT *, 'failed' FROM outbox WHERE seq % 2 = 0")
    place.pass_over()
    rest = place.rows("SELECT id::text FROM outbox WHERE seq % 2 = 1 ORDER BY seq")
    place.send(*(event_id for (event_id,) in rest[1:]))
    _drop(place)
    report = place.reconcile()
    assert (report.source, report.events) == ("archive", 6)
    assert found(report.sides[0]) == {"missing": 1, "dead_letters": 3}
    (example,) = one(report.sides[0], "missing").examples
    assert (example.id, example.event_type) == (rest[0][0], "order.placed")
    dead = [event_id for event_id in ids if (event_id,) not in rest]
    act = {"actor": "alice", "reason": "mended"}
    ParkedDeadLetters(place.settings).act("discard", {"ids": [dead[0]]}, **act)
    ParkedDeadLetters(place.settings).act("replay", {"ids": [dead[1]]}, **act)
    place.relay()
    report = place.reconcile()
    assert found(report.sides[0]) == {"missing": 1, "late_replays": 1, "dead_letters": 1, "discarded": 1}
    # Released, and in no topic: that of the file says nothing any more.
    place.rows("DELETE FROM outbox_parked WHERE state = 'failed'")
    assert found(place.reconcile().sides[0]) == {"missing": 2, "late_replays": 1, "discarded": 1}


@pytest.mark.extended
def test_an_event_of_a_dropped_neighbour_is_no_phantom(place: Place) -> None:
    (late,) = place.write(1, id=new_id(day=DAY + timedelta(1)))
    place.write(2, day=DAY + timedelta(1))
    place.relay()
    assert late in {each.headers["id"] for each in place.messages()}
    _drop(place)
    assert place.reconcile(DAY + timedelta(1)).equal
    without = place.settings.model_copy(update={"archive": "", "consumers": {}})
    report = days.reconcile(without, DAY + timedelta(1))
    assert found(report.sides[0]) == {"phantom": 1}
    assert report.notes[0].startswith(f"events of {DAY} are unavailable")
    with pytest.raises(SetupError, match="not in the table, and no archive is configured"):
        days.reconcile(without, DAY)
