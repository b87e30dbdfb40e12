"""Topics of types of which the day has lost every event."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from outbox_pipelines.config.rules import Rule
from outbox_pipelines.days.partitions.calendar import leaf_of
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.reconciliation import messages, own_topics, processed
from outbox_pipelines.reconciliation import steps as days
from outbox_pipelines.reconciliation.messages import Topic
from outbox_pipelines.settings import Settings
from tests.reconciliation.place import DAY, START_MS, Place, found, new_id
from tests.relay.topic import create_topic


def _lose(place: Place, aggregate_type: str) -> None:
    """As a failover to an asynchronous replica does."""
    leaf = leaf_of(DAY)
    place.rows(f"ALTER TABLE {leaf} DISABLE TRIGGER USER")
    place.rows(f"DELETE FROM {leaf} WHERE aggregate_type = %s", aggregate_type)


def test_a_type_that_has_lost_all_events_of_the_day_is_not_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against "all present" after a failover, and against findings in topics of other outboxes."""
    invoices, others, copies = (place.outbox.topic(each) for each in ("invoice", "others", "copies"))
    for each in ("invoice", "others", "copies"):
        create_topic(place.outbox, 2, of=each)
    (known,) = place.write(1)
    place.write(2, aggregate_type="invoice")
    place.relay()
    place.send(new_id(), "no id", topic=others, at_ms=START_MS + 1000)
    # Another program has copied an event of ours: that does not make its topic ours.
    place.send(known, new_id(), topic=copies, at_ms=START_MS + 1000)
    _lose(place, "invoice")
    report = place.reconcile()
    assert (report.messages, found(report.sides[0])) == (1, {})
    (note,) = report.notes
    assert note.startswith("not read, since no event, grant or setting shows that they are of this outbox: ")
    assert f"{copies} (2 messages), {invoices} (2 messages), {others} (2 messages); if one is," in note

    # What names it: a rule, a grant, a consumer, an event of another day.
    ruled = place.settings.model_copy(update={"aggregate_types": {"invoice": Rule(topic=invoices)}})
    assert found(days.reconcile(ruled, DAY).sides[0]) == {"phantom": 2}

    def read_of(settings: Settings) -> tuple[bool, list[str]]:
        """Whether the topic of the lost events is read, and the notes about others."""
        consumers = processed.chosen(settings, ())
        with closing(messages.consumer(settings)) as kafka:
            own, notes = own_topics.find(settings, kafka, START_MS, [(0, "order", "order.placed")], consumers)
        assert own <= {place.topic, invoices}
        return invoices in own, notes

    # One for several outboxes does not say whose topic it is.
    is_read, notes = read_of(ruled.inheriting(["aggregate_types"]))
    assert not is_read
    assert "of [outboxes.outbox.aggregate_types.TYPE]" in notes[0]
    place.rows("INSERT INTO outbox_writers VALUES ('billing', '{invoice}')")
    assert read_of(place.settings)[0]
    place.rows("DELETE FROM outbox_writers")
    consumer = {"topics": [invoices], "group": invoices}
    place.name(**consumer)
    assert read_of(place.settings)[0]
    place.name(**consumer, handles_others=True)
    assert not read_of(place.settings)[0]
    place.write(1, aggregate_type="invoice", day=DAY + timedelta(1))
    place.relay()
    assert read_of(place.settings)[0]
    # One that the role may not read, and one that is silent, have reasons of their own.
    sample = messages.read

    def read(settings: Any, kafka: Any, topics: list[Topic], *given: Any) -> Any:
        if topics[0].name == others:
            raise UnavailableError("Kafka has sent nothing for a minute")
        return sample(settings, kafka, topics, *given)

    with monkeypatch.context() as patch:
        patch.setattr(messages, "read", read)
        _, (failed, unknown) = read_of(place.settings)
    assert failed == (
        "not read, since a sample of them could not be read: "
        f"{others} (2 messages): Kafka has sent nothing for a minute"
    )
    assert (copies in unknown, others in unknown) == (True, False)
    # No more than so many are examined.
    monkeypatch.setattr(own_topics, "_MOST", 1)
    assert not read_of(place.settings)[0]


def test_a_topic_of_all_types_is_read_when_all_events_are_lost(place: Place) -> None:
    place.write(3)
    place.relay()
    _lose(place, "order")
    report = days.reconcile(place.settings.model_copy(update={"topic": place.topic}), DAY)
    assert (report.events, found(report.sides[0])) == (0, {"phantom": 3})
