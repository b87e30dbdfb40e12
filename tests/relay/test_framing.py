"""Values framed with the id of their schema: what a message is then, and what happens without a registry."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.catalog.subjects import Subjects
from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.formats.avro import decoding
from outbox_pipelines.formats.protobuf import descriptors
from outbox_pipelines.formats.protobuf.encoding import index_of
from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.quality.status_text import render
from outbox_pipelines.registry import Registry
from outbox_pipelines.relay import service
from outbox_pipelines.relay.kafka import schema_ids
from outbox_pipelines.relay.kafka.message import Encoder, EncodingError, UnregisteredError
from outbox_pipelines.relay.kafka.schema_ids import SchemaIds
from outbox_pipelines.relay.read.slot.slot_cutover import read as read_cutover
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.writer import emit
from outbox_pipelines.writer.references import Reference
from tests.conftest import Outbox, either, patience, read_topic, wait_until
from tests.formats.protobuf.shop import MESSAGE, descriptor_set
from tests.registry import FakeRegistry
from tests.relay.parked import parked_rows
from tests.relay.slot.slots import make as make_slot
from tests.relay.threads import quick, running
from tests.relay.topic import create_topic

CATALOG = """
events:
  placed: {description: x, producer: x, owner: x, aggregate_type: order,
           schema: {type: object, required: [total], properties: {total: {type: number}}}}
  paid: {description: x, producer: x, owner: x, aggregate_type: order, schema: {}}
  bare: {description: x, producer: x, owner: x, aggregate_type: order}
"""
VERSIONS = """
events:
  placed: {description: x, producer: x, owner: x, aggregate_type: order, version: 3,
           versions: {2: {type: object, properties: {total: {type: number}}},
                      1: {type: object, properties: {sum: {type: number}}}},
           schema: {type: object, properties: {total: {type: integer}}}}
"""
PAYLOAD = '{"total": 1.2300}'


@pytest.fixture
def given(registry: FakeRegistry, tmp_path: Path) -> dict[str, Any]:
    """The settings of a format with a schema."""
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG)
    return {"registry_url": registry.url, "catalog_file": path, "format": "json_schema"}


def _register(registry: FakeRegistry, settings: Settings, *event_types: str) -> None:
    assert settings.catalog_file is not None
    found = Subjects(read_catalog(settings.catalog_file), settings).of_event_types
    for event_type in event_types:
        registry.add(found[event_type].name, found[event_type].text, found[event_type].kind)


def _event(event_type: str = "placed", payload: str = PAYLOAD, **metadata: Any) -> Event:
    return Event(1, "id-1", "order", "7", event_type, payload, json.dumps(metadata) if metadata else None)


@pytest.mark.parametrize("framing", ["value", "header"])
def test_confluents_deserializer_reads_the_message(
    registry: FakeRegistry, given: dict[str, Any], framing: str
) -> None:
    """Guards against a frame that clients of a registry do not read, and a payload that is written again."""
    settings = load_settings(**given, registry_framing=framing)
    _register(registry, settings, "paid", "placed")
    encode = Encoder(settings, SchemaIds(settings).known).encode
    value, headers = encode(_event(headers={"__VALUE_schema_id": "x", "a": "b"}))
    assert isinstance(value, str | bytes)
    body = value if isinstance(value, bytes) else value.encode()
    assert body.removeprefix(b"\0\0\0\0\2") == PAYLOAD.encode()
    assert (value == PAYLOAD) is (framing == "header")
    names = [name for name, _ in headers]
    assert names == ["id", "event-type", "aggregate-type", "a", *["__value_schema_id"][: framing == "header"]]
    deserialize = JSONDeserializer(
        None,
        schema_registry_client=SchemaRegistryClient({"url": registry.url}),
        conf={"schema.id.deserializer": dual_schema_id_deserializer},
    )
    context = SerializationContext("order-events", MessageField.VALUE, headers)
    assert deserialize(body, context) == {"total": 1.23}
    # It found the schema by the id.
    value, headers = encode(_event(payload="{}"))
    body = value if isinstance(value, bytes) else str(value).encode()
    with pytest.raises(SerializationError, match="total"):
        deserialize(body, SerializationContext("order-events", MessageField.VALUE, headers))


@pytest.mark.parametrize("framing", ["value", "header"])
def test_confluents_avro_deserializer_reads_the_message(
    registry: FakeRegistry, given: dict[str, Any], framing: str
) -> None:
    """Guards against Avro that clients of a registry do not read, and a converted tombstone."""
    settings = load_settings(**given | {"format": "avro"}, registry_framing=framing, tombstones=True)
    _register(registry, settings, "placed")
    encode = Encoder(settings, SchemaIds(settings).known).encode
    deserialize = AvroDeserializer(
        SchemaRegistryClient({"url": registry.url}),
        conf={"schema.id.deserializer": dual_schema_id_deserializer},
    )
    value, headers = encode(_event())
    context = SerializationContext("order-events", MessageField.VALUE, headers)
    assert deserialize(value, context) == {"total": 1.23}
    assert len(headers) == (4 if framing == "header" else 3)
    assert encode(_event(payload="null"))[0] is None
    with pytest.raises(
        EncodingError, match=r"payload\.note is not in the schema: add it to the event catalog"
    ):
        encode(_event(payload='{"total": 1, "note": ""}'))
    reference = Reference("2026-11-27/a", 1, "0" * 64).payload()
    assert encode(_event(payload=reference))[0] == reference
    # Of any value, such as `paid` has, there is no type.
    with pytest.raises(EncodingError, match="paid has no Avro schema: payload: any value"):
        encode(_event("paid"))


@pytest.mark.parametrize("framing", ["value", "header"])
@pytest.mark.parametrize("message", ["shop.v1.First", MESSAGE, f"{MESSAGE}.Inner"])
def test_confluents_protobuf_deserializer_reads_the_message(
    registry: FakeRegistry, given: dict[str, Any], tmp_path: Path, framing: str, message: str
) -> None:
    """Guards against an index that names another message, and files that a client of a registry lacks."""
    (tmp_path / "shop.binpb").write_bytes(descriptor_set())
    protobuf = f"aggregate_type: order, protobuf: {{file: shop.binpb, message: {message}}}"
    given["catalog_file"].write_text(CATALOG.replace("aggregate_type: order", protobuf))
    settings = load_settings(**given | {"format": "protobuf"}, registry_framing=framing)
    subject = Subjects(read_catalog(given["catalog_file"]), settings).of_event_types["placed"]
    Registry(settings, seconds=5.0).register(subject, "BACKWARD")
    assert [*registry.subjects] == ["shop/common.proto", "order-events-placed"]
    encode = Encoder(settings, SchemaIds(settings).known).encode
    payload = {} if message == "shop.v1.First" else {"n": 5}
    value, headers = encode(_event(payload=json.dumps(payload)))
    descriptor = descriptors.message_of(subject.text, subject.all_imports(), message)
    read = ProtobufDeserializer(
        GetMessageClass(descriptor),
        {"schema.id.deserializer": dual_schema_id_deserializer},
        SchemaRegistryClient({"url": registry.url}),
    )
    found = read(value, SerializationContext("order-events", MessageField.VALUE, headers))
    assert (found.DESCRIPTOR.full_name, MessageToDict(found)) == (message, payload)
    framed_by = dict(headers).get("__value_schema_id", value)
    assert isinstance(framed_by, bytes)
    assert framed_by.startswith(b"\0\0\0\0\2" + index_of(descriptor))
    reference = Reference("2026-11-27/a", 1, "0" * 64).payload()
    assert encode(_event(payload=reference))[0] == reference
    with pytest.raises(EncodingError, match=r"payload\.secret is no field of"):
        encode(_event(payload='{"secret": "hidden"}'))


def test_rules_choose_what_is_framed(registry: FakeRegistry, given: dict[str, Any]) -> None:
    """Guards against a type that is framed along with others, and a tombstone with a value."""
    rules = {"event_types": {"placed": {"format": "json_schema", "tombstones": True}}}
    settings = load_settings(**given | {"format": "json"} | rules)
    _register(registry, settings, "placed")
    encode = Encoder(settings, SchemaIds(settings).known).encode
    assert encode(_event())[0] == b"\0\0\0\0\1" + PAYLOAD.encode()
    assert encode(_event(payload="null"))[0] is None
    assert encode(_event("paid"))[0] == PAYLOAD


@pytest.mark.parametrize("kind", ["json_schema", "avro"])
def test_each_version_has_its_own_schema(registry: FakeRegistry, given: dict[str, Any], kind: str) -> None:
    """Guards against an event of an earlier version that claims to fit the newest schema."""
    given["catalog_file"].write_text(VERSIONS)
    settings = load_settings(**given | {"format": kind})
    _register(registry, settings, "placed@1", "placed@2", "placed")
    ids = SchemaIds(settings)
    encode = Encoder(settings, ids.known, ids.versioned).encode

    def frame(payload: str = PAYLOAD, **metadata: Any) -> bytes:
        value, _ = encode(_event(payload=payload, **metadata))
        assert isinstance(value, bytes)
        return value[:5]

    assert frame('{"sum": 1}', version=1, headers={"a": "b"}) == b"\0\0\0\0\1"
    assert frame(version=2) == b"\0\0\0\0\2"
    assert {frame('{"total": 1}', version=3), frame('{"total": 1}')} == {b"\0\0\0\0\3"}
    assert frame('{"total": 1}', headers={"version": "1"}) == b"\0\0\0\0\3"
    for version in (4, "1.0", True):
        with pytest.raises(
            EncodingError, match=r"placed@.* is not in the event catalog: list the version there"
        ):
            frame(version=version)
    # A type that a writer names like a version.
    settings = load_settings(**given | {"format": kind, "registry_subjects": "topic"})
    hostile = Encoder(settings, SchemaIds(settings).known).encode
    with pytest.raises(EncodingError, match="placed@1 is not in the event catalog, or is retired"):
        hostile(_event("placed@1"))
    deep = json.dumps({"headers": {}, "version": 1}).replace("{}", "[" * 100_000 + "]" * 100_000)
    with pytest.raises(EncodingError, match="nested too deeply"):
        encode(_event()._replace(metadata=deep))


def test_versions_that_are_not_listed_do_not_matter(registry: FakeRegistry, given: dict[str, Any]) -> None:
    """Guards against a type whose events have the version of their aggregate, and are rejected for it."""
    settings = load_settings(**given)
    _register(registry, settings, "placed")
    ids = SchemaIds(settings)
    encode = Encoder(settings, ids.known, ids.versioned).encode
    assert {encode(_event(version=version))[0] for version in (1, 7)} == {b"\0\0\0\0\1" + PAYLOAD.encode()}


@pytest.mark.parametrize("framing", ["value", "header"])
def test_a_reference_has_no_id(registry: FakeRegistry, given: dict[str, Any], framing: str) -> None:
    """Guards against a reference that says it has the schema of its body, which every validating client
    refuses, and against a payload that only mentions the member."""
    settings = load_settings(**given, registry_framing=framing)
    _register(registry, settings, "placed")
    encode = Encoder(settings, SchemaIds(settings).known).encode
    reference = Reference("2026-03-01/x", 1, "0" * 64).payload()
    value, headers = encode(_event(payload=reference))
    assert value == reference
    assert "__value_schema_id" not in dict(headers)
    for other in ('{"text": "\\"outbox-body\\""}', '{"text": "outbox-body"}', '{"outbox-body": 1}'):
        value, headers = encode(_event(payload=other))
        assert (value != other) is (framing == "value")
        assert ("__value_schema_id" in dict(headers)) is (framing == "header")


def test_without_a_format_the_encoder_is_the_fast_one_and_nothing_is_imported() -> None:
    """Guards against a cost, in time or memory, for those who have no schema registry."""
    assert Encoder(load_settings()).encode.__qualname__.startswith("_plain.")
    code = (
        "import sys; from outbox_pipelines.relay import service, worker; "
        "from outbox_pipelines.relay.kafka.producer import IdempotentProducer; "
        "from outbox_pipelines.settings import make_settings; "
        "IdempotentProducer(make_settings(kafka='127.0.0.1:1')); "
        "print([name for name in sys.modules if 'schema_registry' in name or name in ('yaml', 'jsonschema')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_ids_are_asked_for_once(registry: FakeRegistry, given: dict[str, Any]) -> None:
    """Guards against a request for each event, and a type that waits although its id is known."""
    ids = SchemaIds(settings := load_settings(**given))
    _register(registry, settings, "placed")
    assert ids.known("order", "placed").id == 1
    registry.fails = 503, ""
    assert [ids.known("order", "placed").id for _ in range(3)] == [1, 1, 1]
    assert len(registry.asked) == 2
    with pytest.raises(UnregisteredError, match="subject order-events-paid: run `outbox catalog register`"):
        ids.known("order", "paid")
    assert ids.answers()
    for event_type, says in (
        ("bare", "bare has no schema in the event catalog"),
        ("other", "other is not in the event catalog"),
    ):
        with pytest.raises(EncodingError, match=says):
            ids.known("order", event_type)
    with pytest.raises(EncodingError, match=r"would be card-events-placed, .* under order-events-placed"):
        ids.known("card", "placed")
    assert len(registry.asked) == 2


def test_a_missing_schema_is_asked_for_again_by_who_tries_alone(
    registry: FakeRegistry, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that must be restarted after a registration, and attempts in an outage."""
    ids = SchemaIds(settings := load_settings(**given))
    with pytest.raises(UnregisteredError):
        ids.asked("order", "placed")
    _register(registry, settings, "placed")
    # Not for each of many events.
    with pytest.raises(UnregisteredError):
        ids.asked("order", "placed")
    monkeypatch.setattr(schema_ids, "_AGAIN_SECONDS", 0.0)
    registry.fails = 200, "<html>"
    with pytest.raises(UnavailableError):
        ids.asked("order", "placed")
    registry.fails = None
    assert ids.asked("order", "placed").id == ids.known("order", "placed").id == 1


def test_a_silent_registry_is_waited_for_once(
    registry: FakeRegistry, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a relay that stands still for each of its events."""
    monkeypatch.setattr(schema_ids, "_CALL_SECONDS", 0.1)
    monkeypatch.setattr(schema_ids, "_AGAIN_SECONDS", 60.0)
    registry.hangs = threading.Event()
    ids = SchemaIds(load_settings(**given))
    for _ in range(100):
        with pytest.raises(UnavailableError, match="timed out"):
            ids.known("order", "placed")
    assert len(registry.asked) == 1
    assert not ids.answers()


def test_a_slow_registry_is_asked_in_portions(
    registry: FakeRegistry, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a publishing thread that stands still for as long as all types take together."""
    monkeypatch.setattr(schema_ids, "_SECONDS", -1.0)
    ids = SchemaIds(load_settings(**given))
    with pytest.raises(UnavailableError, match=r"^the schema registry has answered for 0 of 2"):
        ids.connect()
    monkeypatch.setattr(schema_ids, "_SECONDS", 5.0)
    ids.connect()


def _emit(outbox: Outbox, *event_types: str, payload: Any = None) -> None:
    with outbox.connect(autocommit=False) as connection:
        for event_type in event_types:
            emit(connection, "order", event_type, event_type, payload or {"total": 1})


@pytest.fixture
def framed(outbox: Outbox, given: dict[str, Any]) -> Settings:
    """The settings of a relay that frames; its topic exists."""
    create_topic(outbox)
    return quick(outbox, **given)


@pytest.mark.parametrize("delivery", either("at_least_once", "exactly_once"))
def test_a_missing_schema_parks_its_type_alone(
    outbox: Outbox, registry: FakeRegistry, framed: Settings, monkeypatch: pytest.MonkeyPatch, delivery: str
) -> None:
    """Guards against a type without a schema that stops others, or is not published once it has one."""
    monkeypatch.setattr("outbox_pipelines.relay.core.parked._TOPIC_SECONDS", 0.2)
    monkeypatch.setattr(schema_ids, "_AGAIN_SECONDS", 0.1)
    settings = framed.model_copy(update={"delivery": delivery, "max_attempts": 1})
    _register(registry, settings, "placed")
    with running(settings):
        _emit(outbox, "paid", "bare", "placed")
        wait_until(lambda: len(outbox.messages()) == 1)
        expected = [("paid", "retrying", 0), ("bare", "failed", 1)]
        wait_until(
            lambda: [(row[0], *row[2:]) for row in parked_rows(outbox)] == expected,
            what="one waits, one is a dead letter",
        )
        with outbox.connect() as connection:
            rows = connection.execute("SELECT last_error FROM outbox_parked ORDER BY seq").fetchall()
        assert "order-events-paid: run `outbox catalog register`" in rows[0][0]
        assert "bare has no schema in the event catalog" in rows[1][0]
        _register(registry, settings, "paid")
        wait_until(lambda: len(outbox.messages()) == 2)
        _emit(outbox, "paid")
        wait_until(lambda: len(outbox.messages()) == 3)
    values = [message.value for message in outbox.messages()]
    assert values == ['\0\0\0\0\1{"total": 1}', *['\0\0\0\0\2{"total": 1}'] * 2]


def test_events_of_a_slot_are_framed_by_their_version(
    outbox: Outbox, registry: FakeRegistry, framed: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a slot whose events have another schema than those read between snapshots."""
    monkeypatch.setattr("outbox_pipelines.relay.core.parked._TOPIC_SECONDS", 0.2)
    monkeypatch.setattr(schema_ids, "_AGAIN_SECONDS", 0.1)
    assert framed.catalog_file is not None
    framed.catalog_file.write_text(VERSIONS)
    _register(registry, framed, "placed", "placed@2")
    make_slot(outbox)
    settings = framed.model_copy(update={"max_attempts": 1})
    with running(settings):
        wait_until(lambda: read_cutover(settings).reader is not None, what="the slot to be read")
        with outbox.connect(autocommit=False) as connection:
            for version in (1, 2, 3, None, 4):
                emit(connection, "order", str(version), "placed", {"total": 1}, version=version)
        wait_until(lambda: len(outbox.messages()) == 3)
        expected = [("1", "retrying"), ("4", "failed")]
        wait_until(
            lambda: [(row[0], row[2]) for row in parked_rows(outbox)] == expected, what="two to be parked"
        )
        _register(registry, framed, "placed@1")
        wait_until(lambda: len(outbox.messages()) == 4)
    frames = {message.key: (message.value or "")[:5] for message in outbox.messages()}
    assert frames == {"2": "\0\0\0\0\2", "3": "\0\0\0\0\1", "None": "\0\0\0\0\1", "1": "\0\0\0\0\3"}


def test_a_payload_that_has_no_avro_parks_alone_until_the_schema_is_corrected(
    outbox: Outbox, registry: FakeRegistry, framed: Settings
) -> None:
    """Guards against an event that stops others, a reason without a place, and a useless correction."""
    settings = framed.model_copy(update={"format": "avro", "max_attempts": 1_000_000})
    assert settings.catalog_file is not None
    _register(registry, settings, "placed")
    with outbox.connect(autocommit=False) as connection:
        for key, total in (("a", "5"), ("a", 6), ("b", 7)):
            emit(connection, "order", key, "placed", {"total": total})
    with running(settings):
        wait_until(lambda: [message.key for message in outbox.messages()] == ["b"])
        wait_until(lambda: [(row[0], row[2]) for row in parked_rows(outbox)][:1] == [("a", "retrying")])
    with outbox.connect() as connection:
        [(reason,), _] = connection.execute("SELECT last_error FROM outbox_parked ORDER BY seq").fetchall()
    assert reason == "EncodingError: payload.total is a string in place of a number"
    settings.catalog_file.write_text(CATALOG.replace("{type: number}", "{type: [number, string]}"))
    _register(registry, settings, "placed")
    with running(settings):
        wait_until(lambda: [message.key for message in outbox.messages()] == ["b", "a", "a"])
    [(_, corrected)] = registry.subjects.values()
    read = decoding.reader(corrected)
    values = [(message.value or "").encode() for message in outbox.messages()[1:]]
    assert [read(value[5:]) for value in values] == [{"total": "5"}, {"total": 6}]


def test_the_reason_is_short_whatever_the_payload_has(
    outbox: Outbox, framed: Settings, registry: FakeRegistry
) -> None:
    """Guards against a name in a payload that fills logs and tables, or makes a copy lose its value."""
    settings = framed.model_copy(update={"format": "avro", "max_attempts": 1, "dead_letter_topics": True})
    _register(registry, settings, "placed")
    payload = {"total": 1, "\x1b[2J" + "x" * 800_000: 1}
    _emit(outbox, "placed", payload=payload)
    with running(settings):
        wait_until(lambda: [state for _, _, state, _ in parked_rows(outbox)] == ["failed"], what="it is dead")
    with outbox.connect() as connection:
        [[why]] = connection.execute("SELECT last_error FROM outbox_parked").fetchall()
    assert len(why) < 1_000
    assert "is not in the schema" in why
    assert "\x1b" not in why
    [copy] = read_topic(outbox.settings.kafka, f"{outbox.topic()}.dlq")
    assert copy.headers["dead-letter-reason"] == why
    assert len(copy.value or "") > 800_000


@pytest.mark.extended
def test_a_registry_that_is_away_is_an_outage(
    outbox: Outbox, registry: FakeRegistry, framed: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against attempts that an outage takes, a status that blames Kafka, and a stop that waits."""
    caplog.set_level(logging.WARNING)
    _register(registry, framed, "placed", "paid")
    registry.fails = 503, ""
    _emit(outbox, *["placed", "paid"] * 5)
    with running(framed):
        wait_until(lambda: "waits for the schema registry, breaker" in status_of(outbox))
        assert "HTTP 503" in status_of(outbox)
        assert parked_rows(outbox) == []
        registry.fails = None
        wait_until(lambda: len(outbox.messages()) == 10)
        # What is known now does without the registry.
        registry.fails = 503, ""
        _emit(outbox, "placed")
        wait_until(lambda: len(outbox.messages()) == 11)
    assert "waiting for the schema registry: the schema registry (http://127.0.0.1" in caplog.text
    assert "the schema registry is available again" in caplog.text
    assert "Kafka is" not in caplog.text
    registry.hangs = threading.Event()
    _emit(outbox, "placed")
    with running(framed):
        wait_until(lambda: "timed out" in status_of(outbox), what="the registry to be waited for")
        stopped_at = time.monotonic()
    assert time.monotonic() - stopped_at < patience(10)
    assert parked_rows(outbox) == []


def status_of(outbox: Outbox) -> str:
    return render(outbox_measurements.read(outbox.settings), [])


@pytest.mark.parametrize(
    ("answer", "says"),
    [((401, ""), "HTTP 401"), ((200, "<html>"), "does not answer as a schema registry")],
)
def test_a_wrong_setting_ends_the_relay_at_its_start(
    outbox: Outbox, registry: FakeRegistry, framed: Settings, answer: tuple[int, str], says: str
) -> None:
    """Guards against a relay that waits for what only a person can correct."""
    registry.fails = answer
    with pytest.raises(SetupError, match=says):
        service.relay(framed)
    with pytest.raises(SetupError, match="OUTBOX_CATALOG_FILE"):
        service.relay(framed.model_copy(update={"catalog_file": Path("/missing.yaml")}))
