"""What an application behind Dapr receives of the relay's messages: docs/dapr.md."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, read_topic, wait_until
from tests.interop.conftest import Start
from tests.interop.sidecar import PUBSUB, Answer, App, Request
from tests.kafka_clients import Producer

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _relay(outbox: Outbox, **settings: Any) -> None:
    """Publishes what is due, as CloudEvents."""
    ours = {"value_format": "cloudevents", "cloudevents_source": "https://example.com/shop", **settings}
    given = {
        "dsn": outbox.settings.dsn.reveal(),
        "kafka": outbox.settings.kafka,
        "topic": outbox.settings.topic,
    }
    service.relay(load_settings(**given, **ours), until_empty=True)


def _subscribed(outbox: Outbox, **more: Any) -> list[dict[str, Any]]:
    return [{"pubsubname": PUBSUB, "topic": outbox.topic(), "route": "/events", **more}]


def _emit(outbox: Outbox, aggregate_id: object, payload: object, event_type: str = "order.placed") -> str:
    with outbox.connect(autocommit=False) as connection:
        return str(emit(connection, "order", aggregate_id, event_type, payload).id)


def _until(app: App, count: int) -> list[Request]:
    """Waits for so many requests, and returns all."""
    wait_until(
        lambda: len(app.received) >= count, seconds=30, what=f"{count} requests, of {len(app.received)}"
    )
    return app.received


def _answering(*answers: Answer) -> Callable[[Request], Answer]:
    """These answers, one after the other, then success."""
    left = list(answers)
    return lambda request: left.pop(0) if left else (200, {"status": "SUCCESS"})


def test_a_subscriber_receives_the_cloudevent_unchanged(outbox: Outbox, start: Start) -> None:
    """Guards against an event that Dapr wraps, changes or refuses."""
    with outbox.connect(autocommit=False) as connection:
        written = emit(
            connection,
            "order",
            "größer",
            "order.placed",
            {"total": 5, "digits": 12345678901234567890123, "lines": [{"n": 1}]},
            idempotency_key="k",
            correlation_id="c-1",
            causation_id="c-0",
            traceparent=TRACEPARENT,
            version=3,
            headers={"tenant": "eu", "tracestate": "a=1"},
        )
    _relay(outbox)
    app = App(_subscribed(outbox))
    start(app)
    [request] = _until(app, 1)
    [message] = outbox.messages()
    assert request.path == "/events"
    assert request.body.decode() == message.value
    time = request.event.pop("time")
    assert time.endswith("Z")
    assert json.loads(request.body) == {
        "specversion": "1.0",
        "id": str(written.id),
        "source": "https://example.com/shop",
        "type": "order.placed",
        "subject": "größer",
        "time": time,
        "datacontenttype": "application/json",
        "aggregatetype": "order",
        "partitionkey": "größer",
        "idempotencykey": "k",
        "correlationid": "c-1",
        "causationid": "c-0",
        "traceparent": TRACEPARENT,
        "tracestate": "a=1",
        "version": 3,
        "data": {"total": 5, "digits": 12345678901234567890123, "lines": [{"n": 1}]},
    }
    of_http = {"host", "user-agent", "content-length", "accept-encoding", "__timestamp"}
    headers = {name: value for name, value in request.headers.items() if name not in of_http}
    # Bytes of UTF-8, which HTTP's headers show as Latin-1.
    headers["__key"] = headers["__key"].encode("latin-1").decode()
    assert headers == {
        "content-type": "application/cloudevents+json",
        "pubsubname": PUBSUB,
        "__topic": outbox.topic(),
        "__key": "größer",
        "__partition": str(message.partition),
        "__offset": "0",
        "id": str(written.id),
        "event-type": "order.placed",
        "aggregate-type": "order",
        "idempotency-key": "k",
        "correlation-id": "c-1",
        "causation-id": "c-0",
        "traceparent": TRACEPARENT,
        "tracestate": "a=1",
        "tenant": "eu",
        "version": "3",
    }


def test_no_header_of_kafka_is_needed(outbox: Outbox, start: Start) -> None:
    """Guards against a page that demands a header: the value alone is read."""
    event = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "order.placed", "data": {"total": 5}}
    producer = Producer({"bootstrap.servers": outbox.settings.kafka})
    producer.produce(outbox.topic(), json.dumps(event))
    producer.flush()
    app = App(_subscribed(outbox))
    start(app)
    [request] = _until(app, 1)
    assert request.event == event


@pytest.mark.parametrize("payload", [[1, 2], "text", 5, None, True])
def test_data_of_any_json_arrives(outbox: Outbox, start: Start, payload: object) -> None:
    """Guards against data that is turned into a string."""
    _emit(outbox, 1, payload)
    _relay(outbox)
    app = App(_subscribed(outbox))
    start(app)
    [request] = _until(app, 1)
    assert request.event["data"] == payload


def test_rules_route_by_attributes_and_data(outbox: Outbox, start: Start) -> None:
    """Guards against attributes that Dapr's expressions do not find."""
    rules = [
        {"match": 'event.type == "order.cancelled"', "path": "/cancelled"},
        {"match": "event.data.total > 100", "path": "/large"},
        {"match": 'event.aggregatetype == "order"', "path": "/orders"},
    ]
    app = App(_subscribed(outbox, routes={"rules": rules, "default": "/others"}))
    for event_type, total in (("order.cancelled", 1), ("order.placed", 200), ("order.placed", 5)):
        _emit(outbox, 1, {"total": total}, event_type)
    _relay(outbox)
    start(app)
    assert [request.path for request in _until(app, 3)] == ["/cancelled", "/large", "/orders"]


@pytest.mark.parametrize(
    "answer", [(0, {}), (500, {}), (200, {"status": "RETRY"}), (200, {"status": "other"})]
)
def test_an_event_is_delivered_again_before_later_ones(outbox: Outbox, start: Start, answer: Answer) -> None:
    """Guards against a retry that lets later events of the aggregate pass."""
    ids = [_emit(outbox, 1, {"n": n}) for n in range(3)]
    _relay(outbox)
    app = App(_subscribed(outbox), _answering((200, {}), answer, answer))
    start(app)
    assert [request.event["id"] for request in _until(app, 5)] == [ids[0], ids[1], ids[1], ids[1], ids[2]]


@pytest.mark.parametrize("answer", [(404, {}), (200, {"status": "DROP"})])
def test_an_event_is_dropped(outbox: Outbox, start: Start, answer: Answer) -> None:
    """Guards against a page that calls 404 a retry: a wrong route loses events."""
    ids = [_emit(outbox, 1, {"n": n}) for n in range(2)]
    _relay(outbox)
    app = App(_subscribed(outbox), _answering(answer))
    start(app)
    assert [request.event["id"] for request in _until(app, 2)] == ids


def test_a_dropped_event_goes_to_daprs_dead_letter_topic(outbox: Outbox, start: Start) -> None:
    """Guards against a copy that cannot be replayed: value and key stay."""
    event_id = _emit(outbox, 42, {})
    _relay(outbox)
    dead = f"{outbox.topic()}-dead"
    app = App(_subscribed(outbox, deadLetterTopic=dead), _answering((200, {"status": "DROP"})))
    start(app)
    wait_until(lambda: read_topic(outbox.settings.kafka, dead), what="a dead letter")
    [letter] = read_topic(outbox.settings.kafka, dead)
    [message] = outbox.messages()
    assert (letter.key, letter.value, letter.headers["id"]) == ("42", message.value, event_id)


def test_the_order_of_each_aggregate_is_kept(outbox: Outbox, start: Start) -> None:
    """Guards against a sidecar that delivers a partition's messages at the same time."""
    outbox.fill(400, aggregates=20)
    _relay(outbox)
    app = App(_subscribed(outbox))
    start(app)
    _until(app, 400)
    found: dict[str, list[int]] = {}
    for request in app.received:
        found.setdefault(request.event["subject"], []).append(request.event["data"]["n"])
    assert {len(numbers) for numbers in found.values()} == {20}
    assert [numbers for numbers in found.values() if numbers != sorted(numbers)] == []
    assert len({request.headers["__partition"] for request in app.received}) > 2


def test_an_object_that_is_no_cloudevent_arrives_as_one(outbox: Outbox, start: Start) -> None:
    """Guards against a page that promises a check: the body has neither id nor type."""
    event_id = _emit(outbox, 42, {"total": 5})
    _relay(outbox, value_format="payload")
    app = App(_subscribed(outbox))
    start(app)
    [request] = _until(app, 1)
    assert request.event == {"total": 5}
    assert request.headers["content-type"] == "application/cloudevents+json"
    assert (request.headers["id"], request.headers["__key"]) == (event_id, "42")


def test_a_raw_payload_has_another_id_in_each_delivery(outbox: Outbox, start: Start) -> None:
    """Guards against consumers that deduplicate by it; the header has the event's own."""
    event_id = _emit(outbox, 42, [1, 2])
    _relay(outbox, value_format="payload")
    app = App(_subscribed(outbox, metadata={"rawPayload": "true"}), _answering((500, {})))
    start(app)
    one, two = _until(app, 2)
    assert json.loads(base64.b64decode(one.event["data_base64"])) == [1, 2]
    assert (one.event["type"], one.event["datacontenttype"]) == (
        "com.dapr.event.sent",
        "application/octet-stream",
    )
    assert one.headers["id"] == two.headers["id"] == event_id
    assert len({one.event["id"], two.event["id"], event_id}) == 3


def test_a_value_that_is_no_object_blocks_its_partition(outbox: Outbox, start: Start) -> None:
    """Guards against a page without this warning: other partitions continue."""
    _emit(outbox, 42, [1, 2])
    _emit(outbox, 42, {"n": 0})
    outbox.fill(20, aggregates=20)
    _relay(outbox, value_format="payload")
    blocked = {message.partition for message in outbox.messages() if message.key == "42"}
    others = [message for message in outbox.messages() if message.partition not in blocked]
    app = App(_subscribed(outbox))
    sidecar = start(app)
    wait_until(lambda: sidecar.log_text().count("cannot unmarshal array") > 2, what="three attempts")
    received = [(request.headers["__key"], request.body.decode()) for request in _until(app, len(others))]
    assert sorted(received) == sorted((message.key, message.value) for message in others)


def test_a_dead_letter_topic_takes_a_value_that_is_no_object(outbox: Outbox, start: Start) -> None:
    """Guards against a subscription that has one and is blocked all the same."""
    _emit(outbox, 42, [1, 2])
    _emit(outbox, 42, {"n": 2})
    _relay(outbox, value_format="payload")
    dead = f"{outbox.topic()}-dead"
    app = App(_subscribed(outbox, deadLetterTopic=dead))
    start(app)
    assert [request.event for request in _until(app, 1)] == [{"n": 2}]
    assert [letter.value for letter in read_topic(outbox.settings.kafka, dead)] == ["[1, 2]"]


def test_a_tombstone_arrives_as_null(outbox: Outbox, start: Start) -> None:
    """Guards against a deletion that blocks the partition."""
    event_id = _emit(outbox, 42, None)
    _relay(outbox, tombstones=True)
    app = App(_subscribed(outbox))
    start(app)
    [request] = _until(app, 1)
    assert request.body == b"null"
    assert (request.headers["id"], request.headers["__key"]) == (event_id, "42")


def test_an_id_that_no_http_header_can_have_needs_escaped_headers(outbox: Outbox, start: Start) -> None:
    """Guards against a component without `escapeHeaders`: its partition is blocked."""
    _emit(outbox, "4\n2", {})
    _relay(outbox)
    app = App(_subscribed(outbox))
    blocked = start(app)
    wait_until(
        lambda: blocked.log_text().count('invalid header field value for \\"__key') > 2, what="three attempts"
    )
    assert app.received == []
    blocked.stop()
    start(app, escapeHeaders="true")
    [request] = _until(app, 1)
    assert (request.event["subject"], request.headers["__key"]) == ("4\n2", "4%0A2")


def test_a_name_that_no_http_header_can_have_blocks_even_then(outbox: Outbox, start: Start) -> None:
    """Guards against a page that promises that `escapeHeaders` helps with names."""
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 1, "order.placed", {}, headers={"of tenant": "eu"})
    _relay(outbox)
    app = App(_subscribed(outbox))
    sidecar = start(app, escapeHeaders="true")
    wait_until(lambda: sidecar.log_text().count("invalid header field name") > 2, what="three attempts")
    assert app.received == []
