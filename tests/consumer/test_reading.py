"""Every shape that the relay writes, and Debezium's, is the same event to a handler."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outbox_pipelines.consumer import Consumer, Counts, Event
from outbox_pipelines.consumer.kafka_clients import settings
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, wait_until
from tests.consumer.place import Place, running, uuid7

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# In each shape something would be lost, or found only in the value, with these.
FEW = "event-type=,aggregate-type=,idempotency-key=,correlation-id=,causation-id=,traceparent=,version="
RENAMING = "id=event-id,event-type=kind,aggregate-id=about"
RENAMED = {"id": "event-id", "event-type": "kind", "aggregate-id": "about"}


def received(place: Place, count: int, **more: Any) -> list[Event]:
    events: list[Event] = []
    consumer = place.bare(**more)
    consumer.on_other(lambda event, _: events.append(event))
    with running(consumer) as run:
        wait_until(lambda: len(events) == count or run.failure, what=f"{count} events")
        assert run.end() == Counts(handled=count)
    return events


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("payload", ""),
        ("flat", FEW),
        ("envelope", RENAMING),
        ("cloudevents", FEW),
        *(
            pytest.param(value, names, marks=pytest.mark.extended)
            for value, names in [
                *(("payload", names) for names in (FEW, RENAMING)),
                *(("flat", names) for names in ("", RENAMING)),
                *(("envelope", names) for names in ("", FEW)),
                *(("cloudevents", names) for names in ("", RENAMING)),
            ]
        ),
    ],
)
def test_every_shape_of_the_relay(place: Place, outbox: Outbox, value: str, names: str) -> None:
    """Guards against a consumer that must change when the relay's settings do."""
    shaped = Outbox(
        outbox.settings.model_copy(update={"value_format": value, "header_names": names, "tombstones": True})
    )
    with outbox.connect(autocommit=False) as connection:
        written = emit(
            connection,
            "order",
            42,
            "order.placed",
            {"total": 5, "note": "größer"},
            headers={"tenant": "a"},
            idempotency_key="request 7",
            correlation_id="correlated",
            causation_id="caused",
            traceparent=TRACEPARENT,
            version=3,
        )
        emit(connection, "order", 42, "order.removed", None)
    service.relay(shaped.settings, until_empty=True)
    there = Place(place.dsn, place.kafka, outbox.topic())
    before = time.time()
    renamed = RENAMED if "=kind" in names else {}
    event, tombstone = received(there, 2, header_names=renamed)

    assert (event.id, event.aggregate_id) == (str(written.id), "42")
    assert abs(event.timestamp.timestamp() - before) < 60
    assert event.headers["tenant"] == "a"
    assert (event.topic, event.partition) == (outbox.topic(), tombstone.partition)
    assert (event.offset, tombstone.offset) == (0, 1)
    body = {"total": 5, "note": "größer"}
    if value == "flat":
        body |= {"event_type": "order.placed", "idempotency_key": "request 7"}
    assert event.payload == body
    assert (tombstone.payload, tombstone.value) == (None, None)
    if names != FEW:
        assert (tombstone.type, tombstone.aggregate_type) == ("order.removed", "order")

    shown = {
        "type": "order.placed",
        "aggregate_type": "order",
        "idempotency_key": "request 7",
        "correlation_id": "correlated",
        "causation_id": "caused",
        "traceparent": TRACEPARENT,
        "version": 3,
    }
    # What neither headers nor the value contain is unknown.
    in_value = {
        "payload": {"type": ""},
        "flat": {"type", "idempotency_key"},
        "envelope": {"type", "aggregate_type"},
        "cloudevents": set(shown),
    }
    if names == FEW:
        shown = {name: part if name in in_value[value] else None for name, part in shown.items()}
        shown["type"] = "" if value == "payload" else "order.placed"
    assert {name: getattr(event, name) for name in shown} == shown


def test_debeziums_event_router(place: Place) -> None:
    """Its messages as they are by default: the header `id`, the key, and any other headers."""
    place.put('{"total": 5}', key="42", id=str(uuid7()), eventType="order.placed")
    [event] = received(place, 1, header_names={"event-type": "eventType"})
    assert (event.type, event.aggregate_id, event.payload) == ("order.placed", "42", {"total": 5})


def test_an_envelope_or_cloudevent_without_headers(place: Place) -> None:
    """Guards against other producers' events, whose only id is in the value."""
    one, two = uuid7(), uuid7()
    place.put(
        f'{{"event_id": "{one}", "event_type": "a.b", "aggregate_type": "a", "aggregate_id": "1", '
        '"payload": [1], "timestamp": "2026-11-21T06:40:00Z"}'
    )
    place.put(f'{{"specversion": "1.0", "id": "{two}", "type": "c.d", "source": "/x", "data": {{"n": 1}}}}')
    events = {event.id: event for event in received(place, 2)}
    assert (events[str(one)].type, events[str(one)].payload) == ("a.b", [1])
    assert (events[str(two)].type, events[str(two)].payload) == ("c.d", {"n": 1})


def test_a_body_that_looks_like_an_envelope_is_not_opened(place: Place) -> None:
    """Guards against a payload whose contents are taken for the event's own attributes."""
    body = (
        '{"event_id": "another", "event_type": "a", "aggregate_type": "b", "aggregate_id": "c", '
        '"payload": 1, "timestamp": "d"}'
    )
    headers = {"id": str(uuid7()), "event-type": "order.forwarded", "aggregate-type": "order"}
    place.put(body, **headers)
    [event] = received(place, 1)
    assert event.payload["event_id"] == "another"


@pytest.mark.parametrize(
    ("kafka", "says"),
    [
        (
            {"enable.auto.commit": True},
            "kafka has enable.auto.commit=true: remove it, the consumer requires f",
        ),
        ({"enable.auto.offset.store": "true"}, "enable.auto.offset.store=true: remove it"),
        (
            {"auto.offset.reset": "latest"},
            "auto.offset.reset=latest: remove it, the consumer requires earliest",
        ),
        ({"partition.assignment.strategy": "range"}, "the consumer requires cooperative-sticky"),
        ({"topic.auto.offset.reset": "latest"}, r"topic\.auto\.offset\.reset=latest: remove it"),
        (
            {"auto.offset.reset": "latest", "topic.auto.offset.reset": "earliest"},
            "has auto.offset.reset=latest: remove it",
        ),
        (
            {"default.topic.config": {"auto.offset.reset": "latest"}},
            "kafka has default.topic.config: remove it",
        ),
        ({"topic.blacklist": "order-events"}, "would never be handled"),
        ({"test.mock.num.brokers": 1}, "exist only in the client"),
        ({"group.id": ""}, "kafka has an empty group.id"),
        ({"bootstrap.servers": ""}, "kafka has no broker"),
    ],
)
def test_settings_that_break_the_guarantees_are_refused(kafka: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        settings({"bootstrap.servers": "broker:9092", **kafka}, "billing")


@pytest.mark.parametrize("earliest", ["earliest", "smallest", "beginning"])
def test_settings_that_are_right_pass(earliest: str) -> None:
    given = {"bootstrap.servers": "broker:9092", "enable.auto.commit": "False", "group.id": "mine"}
    made = settings(
        {**given, "auto.offset.reset": earliest, "isolation.level": "read_uncommitted"}, "billing"
    )
    assert (made["group.id"], made["isolation.level"]) == ("mine", "read_uncommitted")


def test_what_the_client_is_made_with() -> None:
    """Guards against a setting that is lost: no message would show it for a long time."""
    assert settings(KAFKA, "billing") == KAFKA | {
        "group.id": "billing",
        # Offsets follow the database.
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # A rebalance does not interrupt the partitions that stay.
        "partition.assignment.strategy": "cooperative-sticky",
        "group.protocol": "classic",
        # A partition that is added to the topic is read from its beginning.
        "auto.offset.reset": "earliest",
        "enable.partition.eof": False,
        "isolation.level": "read_committed",
        "retry.backoff.ms": 1000,
    }


KAFKA = {"bootstrap.servers": "broker:9092"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"source": ""}, "source is empty"),
        ({"kafka": "broker:9092"}, "kafka is no dictionary by name"),
        ({"kafka": None}, "kafka is no dictionary"),
        ({"kafka": {"bootstrap.servers": ["broker:9092"]}}, "kafka has no broker"),
        ({"kafka": KAFKA | {"max.poll.interval.ms": "5 min"}}, "='5 min': give milliseconds, as 300000"),
        ({"kafka": KAFKA | {"max.poll.interval.ms": 0}}, "=0: give milliseconds"),
        ({"kafka": KAFKA | {"max.poll.interval.ms": True}}, "=True: give milliseconds"),
        ({"topics": "order-events"}, "topics is not a list"),
        ({"topics": []}, "topics is not a list"),
        ({"dsn": None}, "give exactly one of dsn, connect and session"),
        ({"connect": lambda: None}, "give exactly one of dsn, connect and session"),
        ({"header_names": {"ID": "x"}}, "header_names has 'ID': the names are id, event-type"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Consumer(**{"source": "a", "topics": ["b"], "kafka": KAFKA, "dsn": "", **given})


async def _later(event: Event, connection: object) -> None: ...


def _now(event: Event, connection: object) -> None: ...


def test_handlers_that_cannot_work_are_refused() -> None:
    """Guards against a handler that never runs, and events that count as handled by it."""
    consumer = Consumer(source="a", topics=["b"], kafka=KAFKA, dsn="")
    consumer.on("a", "b")(_now)
    consumer.on_other(_now)
    for register in (consumer.on("c"), consumer.on_other):
        with pytest.raises(SetupError, match="_later is asynchronous"):
            register(_later)
    with pytest.raises(SetupError, match="b has a handler already"):
        consumer.on("b", "c")(_now)
    with pytest.raises(SetupError, match="on_other has a handler already"):
        consumer.on_other(_now)
    with pytest.raises(SetupError, match="give the event types"):
        consumer.on(_now)  # type: ignore[arg-type]
