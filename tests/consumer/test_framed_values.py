"""Values framed with the id of their schema are read without a registry, beside plain ones."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from confluent_kafka import Message
from confluent_kafka.schema_registry import SchemaRegistryClient, header_schema_id_serializer
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.message_factory import GetMessageClass

from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer import AsyncConsumer, Consumer, Counts, DedupeTable, Event, handler_breakers
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.testing import handle, handle_async, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.formats.avro import encoding
from outbox_pipelines.formats.protobuf import descriptors
from outbox_pipelines.registry import SchemaError, SchemaRegistry
from outbox_pipelines.relay import service
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, either, wait_until
from tests.consumer.place import Place, effect, running
from tests.formats.protobuf.shop import MESSAGE, descriptor_set
from tests.registry import FakeRegistry

_EVENTS = """
events:
  order.placed: {description: x, producer: x, owner: x, aggregate_type: order,
                 protobuf: {file: shop.binpb, message: shop.v1.Placed.Inner},
                 schema: {type: object, required: [n], properties: {n: {type: integer}}}}
"""
_FRAME = b"\0\0\0\0\7"


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        (_FRAME + '{"a": "ö"}'.encode(), {"a": "ö"}),
        (_FRAME + b"null", None),
        (b'{"a": "\\u0000"}', {"a": "\0"}),
        # `flat` of another producer: what the headers lack is in the value.
        (_FRAME + b'{"event_type": "order.paid", "a": 1}', {"event_type": "order.paid", "a": 1}),
    ],
)
def test_a_frame_is_no_part_of_the_payload(value: bytes, payload: Any) -> None:
    """Guards against an event that cannot be read without a registry, and a value that is changed."""
    event = Reader({}).read(
        Message(topic="orders", partition=0, offset=0, value=value, headers=[("id", b"1")])
    )
    assert event.payload == payload
    assert event.value == value
    assert event.type == ("order.paid" if b"order.paid" in value else "")


@pytest.mark.parametrize("value", [b"\0", _FRAME, _FRAME + b"\x02a", b"\0" * 9])
def test_bytes_that_are_no_json_stay_bytes(value: bytes) -> None:
    """Guards against a consumer that ends at what another serializer has written."""
    event = Reader({}).read(
        Message(topic="orders", partition=0, offset=0, value=value, headers=[("id", b"1")])
    )
    assert event.value == value
    with pytest.raises(ValueError, match="Expecting value"):
        _ = event.payload


_PLACED: dict[str, Any] = {
    "type": "record",
    "name": "order.placed",
    "fields": [
        {"name": "total", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "coupon", "type": ["null", "string"], "default": None},
    ],
}


@dataclass
class Placed:
    total: Decimal
    coupon: str | None = None


def _consumer(fake: FakeRegistry, seen: list[Any], kind: Any = Event, **more: Any) -> Consumer:
    given: dict[str, Any] = {"registry": SchemaRegistry(fake.url), **more}
    kafka = {"bootstrap.servers": "broker:9092"}
    consumer = Consumer(source="billing", topics=["t"], kafka=kafka, dsn="host=none.invalid", **given)

    def placed(event: Any, connection: object) -> None:
        seen.append(event)

    placed.__annotations__["event"] = kind
    consumer.on("order.placed")(placed)
    return consumer


def test_values_in_avro_are_read_beside_others(registry: FakeRegistry) -> None:
    """Guards against a topic of which a consumer reads a part, and a request for each event."""
    client = SchemaRegistryClient({"url": registry.url})
    serialize = AvroSerializer(client, json.dumps(_PLACED), conf={"auto.register.schemas": True})
    in_header = AvroSerializer(
        client,
        json.dumps(_PLACED),
        conf={"schema.id.serializer": header_schema_id_serializer, "auto.register.schemas": True},
    )
    payload = {"total": Decimal("1.5"), "coupon": None}
    headers: list[Any] = []
    context = SerializationContext("orders", MessageField.VALUE, headers)
    values = [serialize(payload, context), in_header(payload, context)]
    [(name, guid)] = headers
    json_id = registry.add("orders", '{"type": "object"}')
    events = [
        make_event("order.placed", value=values[0]),
        make_event("order.placed", value=values[1], headers={name: guid.decode(errors="surrogateescape")}),
        make_event("order.placed", value=values[1], headers={name: "\0\0\0\0\1"}),
        make_event("order.placed", value=bytes([0, 0, 0, 0, json_id]) + b'{"total": "1.50"}'),
        make_event("order.placed", {"total": "1.50"}),
        make_event("order.placed", {"total": "1.50"}, headers={name: "\0"}),
    ]
    seen: list[Any] = []
    consumer = _consumer(registry, seen)
    assert handle(consumer, *events, using=None) == ["handled"] * 6
    assert [event.payload for event in seen] == [{"total": "1.50"}] * 6
    asked = len(registry.asked)
    assert handle(consumer, *events[::2], make_event("order.placed"), using=None) == ["handled"] * 4
    assert len(registry.asked) == asked
    assert seen[-1].payload is None
    handle(_consumer(registry, seen, Placed), events[0], using=None)
    assert seen[-1] == Placed(Decimal("1.50"))
    reader = SchemaRegistry(registry.url).reader
    assert reader(values[0][:5]) is reader(values[0][:5])


def test_each_value_is_read_by_the_schema_that_it_was_written_with(registry: FakeRegistry) -> None:
    """Guards against a schema that changes, which older events of the topic do not fit."""
    newer = {**_PLACED, "fields": [*_PLACED["fields"], {"name": "by", "type": "string", "default": "x"}]}
    values = []
    for schema, payload in ((_PLACED, '{"total": "1"}'), (newer, '{"by": "y", "total": "2"}')):
        schema_id = registry.add("orders", text := json.dumps(schema), "AVRO")
        values.append(bytes([0, 0, 0, 0, schema_id]) + encoding.writer(text)(payload))
    seen: list[Any] = []
    events = [make_event("order.placed", value=each) for each in (*values, values[0])]
    handle(_consumer(registry, seen), *events, using=None)
    older = {"total": "1.00"}
    assert [event.payload for event in seen] == [older, {"total": "2.00", "by": "y"}, older]


def test_values_of_confluents_protobuf_serializer_are_read(registry: FakeRegistry) -> None:
    """Guards against values of other programs, whose schemas are files that import others."""
    file = descriptors.file_of(descriptor_set(), MESSAGE)
    descriptor = descriptors.message_of(file.text, descriptors.texts_of(file), MESSAGE)
    placed = GetMessageClass(descriptor)(n=1, order_id="7", lines=[{"sku": "a"}])
    headers: list[Any] = []
    context = SerializationContext("orders", MessageField.VALUE, headers)
    client = SchemaRegistryClient({"url": registry.url})
    value = ProtobufSerializer(type(placed), client)(placed, context)
    in_header = {"schema.id.serializer": header_schema_id_serializer}
    bare = ProtobufSerializer(type(placed), client, in_header)(placed, context)
    [(name, guid)] = headers
    seen: list[Any] = []
    events = [
        make_event("order.placed", value=value),
        make_event("order.placed", value=bare, headers={name: guid.decode(errors="surrogateescape")}),
    ]
    assert handle(_consumer(registry, seen), *events, using=None) == ["handled"] * 2
    for event in seen:
        assert event.payload.items() >= {"n": 1, "order_id": "7"}.items()
        assert event.payload["lines"] == [{"sku": "a"}]
    for wrong in (value[:-1], value[:6], value[:5], value[:5] + b"\2\x20" + value[7:]):
        event = make_event("order.placed", value=wrong)
        verdicts = handle(_consumer(registry, seen, dict[str, Any]), event, using=None, raises=False)
        assert verdicts == ["dead_letter"]


def test_an_event_loop(registry: FakeRegistry) -> None:
    """Guards against an asynchronous handler, or a batch, that gets what it cannot read."""
    text = json.dumps(_PLACED)
    registry.add("orders", text, "AVRO")
    consumer = AsyncConsumer(
        source="billing",
        topics=["t"],
        kafka={"bootstrap.servers": "broker:9092"},
        dsn="host=none.invalid",
        registry=SchemaRegistry(registry.url),
    )
    seen: list[Any] = []

    @consumer.on("order.placed", batch=10)
    async def placed(events: list[Event[Placed]], connection: object) -> None:
        seen.extend(event.payload for event in events)

    value = b"\0\0\0\0\1" + encoding.writer(text)('{"total": "2"}')
    events = [
        make_event("order.placed", value=value),
        make_event("order.placed", {"total": 3, "coupon": "x"}),
    ]
    assert asyncio.run(handle_async(consumer, *events, using=None)) == ["handled", "handled"]
    assert seen == [Placed(Decimal(2)), Placed(Decimal(3), "x")]


@pytest.mark.parametrize(
    ("value", "verdict", "says"),
    [
        (b"\0\0\0\0\1\2", "dead_letter", "is rejected: the bytes do not fit the schema"),
        (b"\0\0\0\0\2{", "dead_letter", r"is rejected: its value is not JSON: .*\(char 1\)$"),
        (b"\0\0\0\0\2" + b"9" * 50_000, "dead_letter", "an integer with more digits than Python reads$"),
        (b"\0\0\0\0\2\xff", "dead_letter", "its value is not JSON: it is not UTF-8$"),
        (b"", "dead_letter", "is rejected: its value is empty, and is not JSON"),
        (b"\0\0", "dead_letter", "is rejected: its value is not JSON"),
        (b"\0\0\0\0\1\2\0\2\xff", "dead_letter", "is rejected: the bytes do not fit the schema"),
        (b"\0\0\0\0\x09", "retry", "the schema 9 is not in the schema registry http"),
        (b"\0\0\0\0\3", "retry", "the schema 3 is for XML, which is not read"),
        (b"\0\0\0\0\4", "retry", "the schema 4 is no Avro schema that can be read alone"),
        (
            b"\0\0\0\0\5" + b"\2" * 200_000 + b"\0",
            "dead_letter",
            "is rejected: the value is nested too deeply",
        ),
    ],
)
def test_what_cannot_be_read(registry: FakeRegistry, value: bytes, verdict: str, says: str) -> None:
    """Guards against a consumer that ends at such an event, and an attempt at what stays unreadable."""
    deep = '{"type": "record", "name": "n", "fields": [{"name": "c", "type": ["null", "n"]}]}'
    for text, kind in ((json.dumps(_PLACED), "AVRO"), ("{}", "JSON"), ("p", "XML"), ('"C"', "AVRO")):
        registry.add("orders", text, kind)
    registry.add("orders", deep, "AVRO")
    consumer = _consumer(registry, [], dict[str, Any])
    event = make_event("order.placed", value=value)
    assert handle(consumer, event, using=None, raises=False) == [verdict]
    with pytest.raises(Exception, match=says):
        handle(consumer, event, using=None)


def test_avro_without_a_registry_says_what_to_pass(registry: FakeRegistry) -> None:
    """Guards against a consumer whose dead letters do not say that it lacks the registry."""
    with pytest.raises(ValueError, match=r"\(char 1\)$"):
        _ = make_event("order.placed", value=b"{").payload
    event = make_event("order.placed", value=b"\0\0\0\0\1\2\5\0")
    with pytest.raises(ValueError, match=r"for Avro or Protobuf, pass registry=SchemaRegistry\(…\)"):
        _ = event.payload
    for wrong, says in (
        ({"registry": registry.url}, "registry is 'http.*: write for example SchemaRegistry"),
        ({"dedupe_table": DedupeTable("t", value="payload:id")}, "dedupe_table uses the payload, which with"),
    ):
        with pytest.raises(SetupError, match=says):
            _consumer(registry, [], **wrong)
    with pytest.raises(SetupError, match="no schema registry is named: set OUTBOX_REGISTRY_URL"):
        SchemaRegistry()


def test_a_registry_without_guids_does_not_have_the_schema(registry: FakeRegistry) -> None:
    """Guards against an event that pauses its handler without end, and one that a wrong URL makes dead."""
    registry.has_guids = False
    event = make_event("order.placed", value=b"\1" * 17 + b"\2")
    with pytest.raises(
        SchemaError, match=r"the schema 0101.* is not in .*, in a version that has GUIDs, and"
    ):
        handle(_consumer(registry, []), event, using=None)
    assert handle(_consumer(registry, []), event, using=None, raises=False) == ["retry"]
    for body in ('{"error_code": 404, "message": "HTTP 404 Not Found"}', "<html>"):
        registry.fails = 404, body
        with pytest.raises(Exception, match="does not answer as a schema registry"):
            handle(_consumer(registry, []), event, using=None)


@pytest.mark.extended
@pytest.mark.slow
def test_a_registry_that_is_away_is_an_outage(
    place: Place, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against dead letters after an outage of the registry."""
    monkeypatch.setattr(handler_breakers, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(handler_breakers, "_LONGEST_PAUSE", 0.1)
    schema = '{"type": "record", "name": "a", "fields": [{"name": "n", "type": "long"}]}'
    registry.add("orders", schema, "AVRO")
    registry.fails = 503, ""
    consumer = place.bare(max_attempts=1, retry_seconds=0.05, registry=SchemaRegistry(registry.url))

    @consumer.on("order.placed")
    def placed(event: Event, connection: psycopg.Connection[Any]) -> None:
        effect(event, connection)

    for n in range(3):
        value = b"\0\0\0\0\1" + encoding.writer(schema)(json.dumps({"n": n}))
        place.put(value, key=str(n), id=str(uuid.uuid4()), event_type="order.placed", aggregate_type="order")
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"waiting": 3}, seconds=60, what="events that wait")
        seen = consumer.counts.failures
        wait_until(lambda: consumer.counts.failures >= seen + 3, seconds=60, what="further attempts")
        assert place.value("SELECT max(attempts) FROM inbox") == 0
        assert "HTTP 503" in place.value("SELECT max(last_error) FROM inbox")
        registry.fails = None
        wait_until(lambda: place.effects() == 3, seconds=60, what="effects")
        assert run.end().dead_letters == 0


@pytest.mark.parametrize("kind", either("json_schema", "avro", "protobuf"))
def test_a_topic_changes_from_plain_to_framed_values_while_all_run(
    place: Place, outbox: Outbox, registry: FakeRegistry, tmp_path: Path, kind: str
) -> None:
    """Guards against a migration that loses or repeats events, and framed ones that nothing shows."""
    path = tmp_path / "catalog.yaml"
    path.write_text(_EVENTS)
    (tmp_path / "shop.binpb").write_bytes(descriptor_set())
    plain = outbox.settings
    given = {"format": kind, "registry_url": registry.url, "catalog_file": path}
    framed = plain.model_copy(update=given)
    reads = SchemaRegistry(registry.url) if kind != "json_schema" else None
    consumer = Place(place.dsn, place.kafka, outbox.topic()).bare(max_attempts=2, registry=reads)
    seen: list[Any] = []

    @consumer.on("order.placed")
    def placed(event: Event, connection: psycopg.Connection[Any]) -> None:
        seen.append(event.payload)
        # One is tried again from the inbox, one becomes a dead letter.
        if event.payload and (event.payload["n"] == 3 or seen.count(event.payload) < event.payload["n"]):
            raise ValueError("not now")
        effect(event, connection)

    def publish(settings: Any, payload: Any) -> None:
        with outbox.connect(autocommit=False) as connection:
            emit(connection, "order", json.dumps(payload), "order.placed", payload)
        service.relay(settings, until_empty=True)

    with running(consumer) as run:
        publish(plain, {"n": 1})
        wait_until(lambda: place.effects() == 1 or run.failure)
        # Registered beside the running relay and consumer; then the relay starts with the format.
        environment = {
            **{"OUTBOX_REGISTRY_URL": registry.url, "OUTBOX_CATALOG_FILE": str(path)},
            **{"OUTBOX_FORMAT": kind, "OUTBOX_TOPIC": plain.topic},
        }
        assert CliRunner().invoke(cli, ["catalog", "register"], env=environment).exit_code == 0
        publish(framed, {"n": 2})
        publish(framed.model_copy(update={"registry_framing": "header"}), {"n": 0})
        publish(framed.model_copy(update={"tombstones": True}), None)
        publish(framed, {"n": 3})
        # And back.
        publish(plain, {"n": -1})
        wait_until(lambda: (place.effects(), place.inbox().get("failed")) == (5, 1) or run.failure)
        assert run.end() == Counts(handled=5, failures=3, received=2, dead_letters=1)
    starts = sorted((message.value or "-")[:1] for message in outbox.messages())
    # Beside the header 0 is one byte in Avro, and none in Protobuf.
    of_zero = {"json_schema": ["-", "{"], "avro": ["\0", "-"], "protobuf": ["-", "-"]}
    assert starts == ["\0", "\0", *of_zero[kind], "{", "{"]
    assert place.rows("SELECT array_agg(n ORDER BY n) FROM effects") == [([-1, 0, 1, 2, None],)]
    (message_id,) = [
        str(each) for (each,) in place.rows("SELECT message_id FROM inbox WHERE state = 'failed'")
    ]
    shown = CliRunner().invoke(
        cli,
        ["consumer", "dead-letters", "show", message_id],
        env={"OUTBOX_CONSUMER_DSN": place.dsn, "OUTBOX_REGISTRY_URL": registry.url},
    )
    assert json.loads(shown.stdout)["payload"] == {"n": 3}
