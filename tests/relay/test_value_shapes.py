"""The shapes of a message's value, from a row of the table to a consumer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat

from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from outbox_pipelines.relay.kafka.message import Encoder, EncodingError, Value
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Message, Outbox
from tests.relay.topic import NOISE, create_topic

BODY = (
    '{"text": "gr\\u00f6\\u00dfer \\" \\\\", "exact": 0.1000, "large": 1e400, "nested": {"a": [null, true]}}'
)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _flat(payload: str, metadata: str | None = None) -> Value:
    event = Event(7, "0198", "order", "42", "order.placed", payload, metadata)
    return Encoder(load_settings(value_format="flat")).encode(event)[0]


def _shaped(outbox: Outbox, **settings: object) -> Outbox:
    return replace(outbox, settings=outbox.settings.model_copy(update=settings))


def _write(outbox: Outbox) -> tuple[str, str, datetime]:
    """An event with everything in it; its id, its payload as PostgreSQL prints it, its time."""
    with outbox.connect() as connection:
        row = connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers, "
            "idempotency_key, correlation_id, causation_id, traceparent, version) "
            "VALUES ('order', '4\"2', 'order.placed', %s, %s, 'key \"1\"', 'c-1', 'c-0', %s, 3) "
            "RETURNING id::text, payload::text, created_at",
            [BODY, '{"tenant": "eu", "tracestate": "a=1", "ce_id": "x"}', TRACEPARENT],
        ).fetchone()
    assert row is not None
    event_id, payload, created_at = row
    return event_id, payload, created_at


def _relayed(outbox: Outbox, **settings: object) -> Message:
    service.relay(_shaped(outbox, **settings).settings, until_empty=True)
    (message,) = outbox.messages()
    return message


def test_flat_adds_type_and_key_to_the_body(outbox: Outbox) -> None:
    """Guards against a body that lost a member, or a number that lost a digit."""
    _, payload, _ = _write(outbox)
    message = _relayed(outbox, value_format="flat")
    expected = '{"event_type": "order.placed", "idempotency_key": "key \\"1\\"", ' + payload[1:]
    assert message.value == expected
    assert json.loads(message.value) == {
        "event_type": "order.placed",
        "idempotency_key": 'key "1"',
        **json.loads(payload),
    }
    assert message.headers["traceparent"] == TRACEPARENT


@pytest.mark.parametrize(
    ("payload", "metadata", "value"),
    [
        ("{}", None, '{"event_type": "order.placed"}'),
        # As a column of type json or text has it.
        (" { }\n", None, '{"event_type": "order.placed"}'),
        ('\n{ "a":1 }', None, '{"event_type": "order.placed", "a":1 }'),
        ('{"a": 1}', '{"version": 1, "headers": {}}', '{"event_type": "order.placed", "a": 1}'),
        # The body's own members of these names: the relay's win, and all else stays as it was.
        (
            '{"a": 0.1000, "event_type": "x", "b": []}',
            None,
            '{"event_type": "order.placed", "a": 0.1000, "b": []}',
        ),
        ('{"event_type": "x"}', None, '{"event_type": "order.placed"}'),
        ('{"idempotency_key": "x"}', None, '{"event_type": "order.placed", "idempotency_key": "x"}'),
        (
            '{"a": {"event_type": 1e400, "ü": "\\n"}}',
            None,
            '{"event_type": "order.placed", "a": {"event_type": 1e400, "ü": "\\n"}}',
        ),
    ],
)
def test_flat_has_each_member_once(payload: str, metadata: str | None, value: str) -> None:
    """Guards against a name that is there twice, which each parser reads in its own way."""
    assert _flat(payload, metadata) == value


@pytest.mark.parametrize(
    ("members", "value"),
    [
        ("event_type=type", '{"type": "order.placed", "idempotency_key": "k", "event_type": 1}'),
        ("event_type=,idempotency_key=", '{"event_type": 1}'),
        (
            "event_type=,event_id=id,aggregate_id=order id,aggregate_type=kind",
            '{"id": "0198", "order id": "7", "kind": "order", "idempotency_key": "k", "event_type": 1}',
        ),
        ("idempotency_key=event_type,event_type=", '{"event_type": "k"}'),
    ],
)
def test_members_have_other_names(members: str, value: str) -> None:
    event = Event(7, "0198", "order", "7", "order.placed", '{"event_type": 1}', '{"idempotency-key": "k"}')
    settings = load_settings(value_format="flat", flat_members=members)
    assert Encoder(settings).encode(event)[0] == value


@pytest.mark.parametrize("payload", ["[1]", '"text"', "5", "null", "true"])
def test_flat_refuses_a_body_that_is_no_object(payload: str) -> None:
    """Guards against a value that is not JSON."""
    with pytest.raises(
        EncodingError, match=r"OUTBOX_VALUE_FORMAT=flat needs a payload that is a JSON object"
    ):
        _flat(payload)


def test_a_body_that_does_not_fit_is_parked_and_says_why(outbox: Outbox) -> None:
    """Guards against an event that is skipped in silence."""
    flat = _shaped(outbox, value_format="flat")
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {"n": 0})
        guilty = emit(connection, "order", 2, "order.placed", [1, 2])
        emit(connection, "order", 3, "order.placed", {"n": 2})
    service.relay(flat.settings, until_empty=True)
    assert {message.key for message in outbox.messages()} == {"1", "3"}
    with outbox.connect() as connection:
        ((parked, attempts, error),) = connection.execute(
            "SELECT id, attempts, last_error FROM outbox_parked"
        )
    assert (parked, attempts) == (guilty.id, 1)
    assert "needs a payload that is a JSON object" in error


@pytest.mark.parametrize("value", ["flat", "envelope", "cloudevents"])
def test_an_event_too_large_in_its_shape_is_named(outbox: Outbox, value: str) -> None:
    """Guards against a report of the broker's that finds no event, since it shows the shape."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    with outbox.connect(autocommit=False) as connection:
        guilty = emit(connection, "order", 1, "order.placed", {"noise": NOISE})
    with pytest.MonkeyPatch.context() as unasked:
        # Otherwise it would be parked before the broker sees it.
        unasked.setattr("outbox_pipelines.relay.kafka.topic_admin._limit", lambda answer: None)
        service.relay(_shaped(outbox, value_format=value).settings, until_empty=True)
    with outbox.connect() as connection:
        ((parked, attempts, error),) = connection.execute(
            "SELECT id, attempts, last_error FROM outbox_parked"
        )
    assert (parked, attempts) == (guilty.id, 1)
    assert "MSG_SIZE_TOO_LARGE" in error


def test_an_envelope_has_all_that_identifies_the_event(outbox: Outbox) -> None:
    """Guards against a time in another zone or precision, and against one that shows up as a header."""
    event_id, payload, created_at = _write(outbox)
    message = _relayed(outbox, value_format="envelope")
    assert message.value is not None
    assert f'"payload": {payload}, ' in message.value
    assert json.loads(message.value) == {
        "event_id": event_id,
        "event_type": "order.placed",
        "aggregate_type": "order",
        "aggregate_id": '4"2',
        "payload": json.loads(payload),
        "timestamp": f"{created_at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f+00:00}",
    }
    assert message.headers == {
        "id": event_id,
        "event-type": "order.placed",
        "aggregate-type": "order",
        "idempotency-key": 'key "1"',
        "correlation-id": "c-1",
        "causation-id": "c-0",
        "traceparent": TRACEPARENT,
        "version": "3",
        "tenant": "eu",
        "tracestate": "a=1",
        "ce_id": "x",
    }


def test_a_cloudevent_is_read_by_the_cloudevents_project(outbox: Outbox) -> None:
    """Guards against what only we would call a CloudEvent."""
    event_id, payload, created_at = _write(outbox)
    message = _relayed(outbox, value_format="cloudevents", cloudevents_source="https://example.com/shop")
    assert message.value is not None
    assert message.headers["content-type"] == "application/cloudevents+json"
    assert message.headers["tenant"] == "eu"
    assert f'"data": {payload}}}' in message.value
    headers = {name: value.encode() for name, value in message.headers.items() if value is not None}
    received = from_kafka(KafkaMessage(headers, message.key, message.value.encode()), JSONFormat())
    assert received.get_data() == json.loads(payload)
    assert received.get_attributes() == {
        "specversion": "1.0",
        "id": event_id,
        "source": "https://example.com/shop",
        "type": "order.placed",
        "subject": '4"2',
        "time": created_at.astimezone(UTC),
        "datacontenttype": "application/json",
        "aggregatetype": "order",
        "partitionkey": '4"2',
        "idempotencykey": 'key "1"',
        "correlationid": "c-1",
        "causationid": "c-0",
        "traceparent": TRACEPARENT,
        "tracestate": "a=1",
        "version": 3,
    }


def test_a_cloudevent_without_metadata_has_no_empty_attributes(outbox: Outbox) -> None:
    """Guards against attributes that are null or empty, which the specification forbids."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", [1], correlation_id="")
    message = _relayed(outbox, value_format="cloudevents")
    assert message.value is not None
    attributes = json.loads(message.value)
    assert sorted(attributes) == [
        *("aggregatetype", "data", "datacontenttype", "id", "partitionkey", "source"),
        *("specversion", "subject", "time", "type"),
    ]
    assert attributes["source"] == "/outbox"
    assert attributes["data"] == [1]


def test_a_cloudevent_has_what_a_dapr_subscriber_needs() -> None:
    """Guards against a change of what Dapr's sidecar passes on; `make interop` has the sidecar."""
    metadata = (
        '{"created-at": "2026-01-01T00:00:00.000000Z", "idempotency-key": "k", "correlation-id": "c-1", '
        f'"causation-id": "c-0", "traceparent": "{TRACEPARENT}", "version": 3, '
        '"headers": {"tracestate": "a=1"}}'
    )
    event = Event(7, "0198", "order", "42", "order.placed", '{"total": 5}', metadata)
    value, headers = Encoder(load_settings(value_format="cloudevents")).encode(event)
    assert value == (
        '{"specversion": "1.0", "source": "/outbox", "datacontenttype": "application/json", "id": "0198", '
        '"type": "order.placed", "subject": "42", "time": "2026-01-01T00:00:00.000000Z", '
        '"aggregatetype": "order", "partitionkey": "42", "idempotencykey": "k", "correlationid": "c-1", '
        f'"causationid": "c-0", "traceparent": "{TRACEPARENT}", "version": 3, "tracestate": "a=1", '
        '"data": {"total": 5}}'
    )
    assert headers == [
        ("id", "0198"),
        ("event-type", "order.placed"),
        ("aggregate-type", "order"),
        ("content-type", "application/cloudevents+json"),
        ("idempotency-key", "k"),
        ("correlation-id", "c-1"),
        ("causation-id", "c-0"),
        ("traceparent", TRACEPARENT),
        ("version", "3"),
        ("tracestate", "a=1"),
    ]


@pytest.mark.parametrize("payload", ["{}", "[1, 2]", "null", '"text"', "5", "1.10"])
def test_every_cloudevent_is_an_object_with_attributes_of_text(payload: str) -> None:
    """Guards against a value that blocks a partition of Dapr: no object, or a traceparent that is no text."""
    metadata = '{"created-at": "2026-01-01T00:00:00.000000Z", "traceparent": "5", "correlation-id": "5"}'
    event = Event(7, "0198", "order", "42", "order.placed", payload, metadata)
    value, _ = Encoder(load_settings(value_format="cloudevents")).encode(event)
    attributes = json.loads(value or "")
    assert attributes.pop("data") == json.loads(payload)
    assert all(re.fullmatch("[a-z0-9]{1,20}", name) for name in attributes)
    assert {name: text for name, text in attributes.items() if not isinstance(text, str)} == {}


def test_a_row_cannot_change_how_a_cloudevent_is_read() -> None:
    """Guards against own headers that make a reader take another id, or another format."""
    metadata = '{"created-at": "2026-01-01T00:00:00.000000Z", "headers": {"content-type": "x", "ce_id": "y"}}'
    event = Event(7, "0198", "order", "42", "order.placed", "{}", metadata)
    headers = dict(Encoder(load_settings(value_format="cloudevents")).encode(event)[1])
    assert headers["content-type"] == "application/cloudevents+json"
    assert "ce_id" not in headers
    assert "content-type" not in dict(Encoder(load_settings()).encode(event)[1])


def test_a_big_tick_and_a_late_transaction_have_their_time(outbox: Outbox) -> None:
    """Guards against one of the ways to read events that leaves the time out."""
    shaped = _shaped(outbox, value_format="envelope", batch_events=100)
    with outbox.connect(autocommit=False) as late:
        emit(late, "order", "late", "order.placed", {})
        outbox.fill(250)
        assert service.relay(shaped.settings, until_empty=True).events == 250
        late.commit()
    assert service.relay(shaped.settings, until_empty=True).events == 1
    bodies = [json.loads(message.value or "") for message in outbox.messages()]
    assert len(bodies) == 251
    assert all(datetime.fromisoformat(body["timestamp"]).tzinfo == UTC for body in bodies)


def test_a_tombstone_arrives_without_a_value(outbox: Outbox) -> None:
    """Guards against the text null where a compacted topic needs nothing."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.removed", None)
        emit(connection, "order", 2, "order.placed", {})
    service.relay(_shaped(outbox, tombstones=True).settings, until_empty=True)
    assert {message.key: message.value for message in outbox.messages()} == {"1": None, "2": "{}"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"value_format": "avro"},
            r"OUTBOX_VALUE_FORMAT=avro: Input should be 'payload', 'flat', 'envelope' or 'cloudevents'",
        ),
        ({"tombstones": "maybe"}, r"OUTBOX_TOMBSTONES=maybe: Input should be a valid boolean"),
        ({"cloudevents_source": "my shop"}, r"OUTBOX_CLOUDEVENTS_SOURCE=my shop: not a URI reference: write"),
        ({"cloudevents_source": ""}, r"OUTBOX_CLOUDEVENTS_SOURCE=: not a URI reference"),
        ({"cloudevents_source": "/50%"}, r"OUTBOX_CLOUDEVENTS_SOURCE=/50%: not a URI reference"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], says: str) -> None:
    """Guards against a shape that shows its mistake at the consumer."""
    with pytest.raises(SetupError, match=f"^{says}"):
        load_settings(**settings)
