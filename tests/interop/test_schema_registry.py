"""A real schema registry: what `outbox catalog register` does there, and what Confluent's client reads."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer.event_reading import Reader
from outbox_pipelines.consumer.event_values import framed
from outbox_pipelines.errors import SetupError
from outbox_pipelines.formats.protobuf import descriptors
from outbox_pipelines.local import jars
from outbox_pipelines.registry import Registry, SchemaError, SchemaRegistry, Subject
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings, make_settings
from outbox_pipelines.writer import emit
from tests import kafka_clients
from tests.conftest import Outbox
from tests.formats.protobuf.shop import MESSAGE, descriptor_set
from tests.interop import build
from tests.interop.apicurio import Apicurio
from tests.relay.topic import create_topic

pytestmark = pytest.mark.slow

_EVENTS = """
events:
  order.placed:
    description: x
    producer: x
    owner: x
    aggregate_type: order
    schema:
      type: object
      additionalProperties: false
      required: [total]
      properties: {total: {type: number}, lines: {type: array, items: {$ref: "#/$defs/line"}}}
      $defs: {line: {type: object, properties: {sku: {type: string}}}}
"""


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    try:
        program = build.apicurio(load_settings())
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)
    server = Apicurio(tmp_path_factory.mktemp("apicurio"), program)
    server.start()
    yield server
    server.stop()


class Catalog:
    """An event catalog and its registrations, under subjects of the test's own."""

    def __init__(self, path: Path, apicurio: Apicurio, topic: str, kind: str = "json_schema") -> None:
        self.path = path
        self._environment = {
            "OUTBOX_REGISTRY_URL": apicurio.url,
            "OUTBOX_CATALOG_FILE": str(path),
            "OUTBOX_FORMAT": kind,
            "OUTBOX_TOPIC": topic,
        }

    def register(self, events: str, *options: str) -> Result:
        self.path.write_text(events)
        return CliRunner().invoke(cli, ["catalog", "register", *options], env=self._environment)


def _one(result: Result) -> dict[str, Any]:
    [found] = json.loads(result.stdout)
    return dict(found)


def test_schemas_are_registered_and_checked(apicurio: Apicurio, tmp_path: Path) -> None:
    """Guards against a registry that is other than the one of the tests."""
    catalog = Catalog(tmp_path / "catalog.yaml", apicurio, "checked-events")
    assert _one(catalog.register(_EVENTS, "--check", "--json"))["status"] == "new"
    first = _one(catalog.register(_EVENTS, "--json"))
    assert first["status"] == "registered"
    assert _one(catalog.register(_EVENTS, "--json")) == {**first, "status": "unchanged"}
    # Written in another order, and with other words of YAML.
    other = _EVENTS.replace("      type: object\n", "").replace(
        "      $defs", "      type: 'object'\n      $defs"
    )
    assert _one(catalog.register(other, "--json")) == {**first, "status": "unchanged"}
    narrower = _EVENTS.replace("required: [total]", "required: [total, lines]")
    for options in ((), ("--check",)):
        result = catalog.register(narrower, *options)
        assert result.exit_code == 1
        assert "not compatible (BACKWARD) with version 1: payload.lines: is required now" in result.stderr
    wider = _EVENTS.replace("{total: {type: number}", "{note: {type: string}, total: {type: number}")
    assert _one(catalog.register(wider, "--check", "--json"))["status"] == "compatible"
    second = _one(catalog.register(wider, "--json"))
    assert (second["status"], second["schema_id"] != first["schema_id"]) == ("registered", True)
    # What was registered before is found, too: a relay may still have the older event catalog.
    assert _one(catalog.register(_EVENTS, "--json")) == {**first, "status": "unchanged"}


@pytest.mark.parametrize("path", ["", "/apis", "/ui"])
def test_a_wrong_path_is_said(apicurio: Apicurio, path: str) -> None:
    """Guards against a schema that seems to be missing, where the address is wrong."""
    settings = make_settings(registry_url=f"http://127.0.0.1:{apicurio.port}{path}")
    with pytest.raises(SetupError, match="does not answer as a schema registry"):
        Registry(settings, seconds=10.0).find(Subject("a", "a", "{}"))


_IN_AVRO = """
events:
  order.placed:
    description: x
    producer: x
    owner: x
    aggregate_type: order
    schema:
      required: [total, at, day, id, state, lines]
      properties:
        total: {type: number, multipleOf: 0.01}
        at: {type: string, format: date-time}
        day: {type: string, format: date}
        id: {type: string, format: uuid}
        state: {enum: [placed, paid]}
        price: {type: string, format: decimal, multipleOf: 0.001}
        note-1: {type: string}
        lines: {type: array, items: {$ref: "#/$defs/line"}}
        of: {$ref: "#"}
      $defs: {line: {type: object, required: [sku], properties: {sku: {type: string}, n: {type: integer}}}}
"""
_ID = "5d1b7c1e-3a54-5c0e-9b61-0d2f6c1f8a77"
_PAYLOAD: dict[str, Any] = {
    **{"total": -12.5, "at": "2026-11-27T09:30:00.25Z", "day": "2026-11-27", "id": _ID, "state": "paid"},
    **{"price": "0.125", "note-1": "ö", "lines": [{"sku": "a", "n": -(2**63)}, {"sku": "b"}]},
}
_READ: dict[str, Any] = {
    **{"total": Decimal("-12.50"), "at": datetime(2026, 11, 27, 9, 30, 0, 250_000, UTC), "id": UUID(_ID)},
    **{"day": date(2026, 11, 27), "state": "paid", "price": Decimal("0.125"), "note_2d_1": "ö", "of": None},
    "lines": [{"sku": "a", "n": -(2**63)}, {"sku": "b", "n": None}],
}


def test_avro_schemas_are_registered_and_checked(apicurio: Apicurio, tmp_path: Path) -> None:
    """Guards against derived schemas that a registry does not take, or that evolve in another way there."""
    catalog = Catalog(tmp_path / "catalog.yaml", apicurio, "avro-events", "avro")
    first = _one(catalog.register(_IN_AVRO, "--json"))
    assert first["status"] == "registered"
    assert _one(catalog.register(_IN_AVRO, "--json")) == {**first, "status": "unchanged"}
    narrower = _IN_AVRO.replace("state, lines]", "state, lines, more]").replace(
        "note-1:", "more: {type: string}\n        note-1:"
    )
    result = catalog.register(narrower, "--check")
    assert result.exit_code == 1
    assert "with version 1: payload.more: is required now, without a default" in result.stderr
    for wider in (
        narrower.replace("more: {type: string}", "more: {type: string, default: none}"),
        _IN_AVRO.replace("note-1:", "another: {type: string}\n        note-1:"),
    ):
        assert _one(catalog.register(wider, "--json"))["status"] == "registered"
    result = catalog.register(_IN_AVRO.replace("sku: {type: string}", "sku: {}"), "--check")
    assert (result.exit_code, "payload.lines[].sku: any value" in result.stderr) == (1, True)


_IN_PROTOBUF = f"""
events:
  order.placed:
    {{description: x, producer: x, owner: x, aggregate_type: order,
      protobuf: {{file: shop.binpb, message: {MESSAGE}}}}}
"""
_OF_PROTOBUF: dict[str, Any] = {
    **{"n": -5, "big": 2**53 + 1, "price": 0.1, "raw": "AAH/", "state": "PAID", "tags": ["ö"]},
    **{"at": "2026-11-27T09:30:00.250Z", "lines": [{"sku": "a", "n": 1}, {"sku": "b"}], "order_id": "7"},
    **{"counts": {"7": {"sku": "c"}}, "mail": "a@b", "more": {"a": [1, None]}, "of": {}},
}


def test_files_of_protobuf_are_registered_and_checked(apicurio: Apicurio, tmp_path: Path) -> None:
    """Guards against descriptors that a registry does not take, or cannot compare."""
    (tmp_path / "shop.binpb").write_bytes(descriptor_set())
    catalog = Catalog(tmp_path / "catalog.yaml", apicurio, "protobuf-events", "protobuf")
    assert _one(catalog.register(_IN_PROTOBUF, "--check", "--json"))["status"] == "new"
    first = _one(catalog.register(_IN_PROTOBUF, "--json"))
    assert first["status"] == "registered"
    assert _one(catalog.register(_IN_PROTOBUF, "--json")) == {**first, "status": "unchanged"}
    (tmp_path / "shop.binpb").write_bytes(descriptor_set(more="by"))
    # It cannot compare compiled files, but when it is to have one.
    assert _one(catalog.register(_IN_PROTOBUF, "--check", "--json"))["status"] == "unchecked"
    second = _one(catalog.register(_IN_PROTOBUF, "--json"))
    assert (second["status"], second["schema_id"] != first["schema_id"]) == ("registered", True)
    (tmp_path / "shop.binpb").write_bytes(descriptor_set(n="string"))
    result = catalog.register(_IN_PROTOBUF)
    assert result.exit_code == 2
    assert "refuses the schema of protobuf-events-order.placed" in result.stderr


def _published(
    outbox: Outbox, apicurio: Apicurio, path: Path, kind: str, framing: str, events: str, payload: Any
) -> Message:
    """Register, publish one event, and return its message."""
    create_topic(outbox)
    catalog = Catalog(path, apicurio, outbox.settings.topic, kind)
    assert catalog.register(events).exit_code == 0
    given = {"format": kind, "registry_url": apicurio.url, "catalog_file": catalog.path}
    settings = outbox.settings.model_copy(update={**given, "registry_framing": framing})
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 7, "order.placed", payload)
    service.relay(settings, until_empty=True)
    consumer = kafka_clients.Consumer({"bootstrap.servers": settings.kafka, "group.id": "x"})
    topic = outbox.topic()
    partitions = consumer.list_topics(topic, timeout=60).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in partitions])
    message = consumer.poll(60)
    consumer.close()
    assert message is not None
    return message


@pytest.mark.parametrize("framing", ["value", "header"])
@pytest.mark.parametrize("kind", ["json_schema", "avro", "protobuf"])
def test_confluents_client_reads_what_the_relay_sends(
    apicurio: Apicurio, outbox: Outbox, tmp_path: Path, kind: str, framing: str
) -> None:
    """Guards against messages that only our own consumer reads."""
    of_json = {"total": 5, "lines": [{"sku": "a"}]}
    given, expected = {
        "json_schema": ((_EVENTS, of_json), of_json),
        "avro": ((_IN_AVRO, _PAYLOAD), _READ),
        "protobuf": ((_IN_PROTOBUF, _OF_PROTOBUF), {**_OF_PROTOBUF, "big": str(2**53 + 1)}),
    }[kind]
    (tmp_path / "shop.binpb").write_bytes(descriptor_set())
    message = _published(outbox, apicurio, tmp_path / "catalog.yaml", kind, framing, *given)
    client = SchemaRegistryClient({"url": apicurio.url})
    either = {"schema.id.deserializer": dual_schema_id_deserializer}
    context = SerializationContext(outbox.topic(), MessageField.VALUE, message.headers())
    if kind == "avro":
        found = AvroDeserializer(client, conf=either)(message.value(), context)
    elif kind == "json_schema":
        found = JSONDeserializer(None, schema_registry_client=client, conf=either)(message.value(), context)
    else:
        # Apicurio cannot give the client what it registers itself: see `Registry.schema`.
        read = ProtobufDeserializer(_placed(), either)(message.value(), context)
        found = {**MessageToDict(read)}
        for line in found["lines"]:
            # Of 64 bits.
            line |= {"n": int(line["n"])} if "n" in line else {}
    assert found == expected
    if kind != "json_schema":
        # Our consumer, by what the real registry answers.
        event = Reader({}).read(message)
        frame, body = event._framed or (b"", b"")
        read_by_us = SchemaRegistry(apicurio.url).reader(frame)
        assert read_by_us is not None
        ours = read_by_us(body)
        # In Protobuf, a message within has its defaults.
        assert {name: ours[name] for name in given[1] if name != "of"} == {
            name: value for name, value in given[1].items() if name != "of"
        }


def _placed() -> Any:
    file = descriptors.file_of(descriptor_set(), MESSAGE)
    return GetMessageClass(descriptors.message_of(file.text, descriptors.texts_of(file), MESSAGE))


def test_the_consumer_reads_what_confluents_client_sends(apicurio: Apicurio) -> None:
    """Guards against ids, and an answer of a real registry, that only Confluent's clients know."""
    client = SchemaRegistryClient({"url": apicurio.url})
    text = json.dumps(
        {
            **{"type": "record", "name": "Placed", "namespace": "shop"},
            "fields": [{"name": "n", "type": {"type": "long", "logicalType": "timestamp-millis"}}],
        }
    )
    serialize = AvroSerializer(client, text)
    value = serialize({"n": _READ["at"]}, SerializationContext("of-others", MessageField.VALUE))
    frame, body = framed(value, {}) or (b"", b"")
    registry = SchemaRegistry(apicurio.url)
    read = registry.reader(frame)
    assert read is not None
    assert read(body) == {"n": "2026-11-27T09:30:00.25Z"}
    with pytest.raises(SchemaError, match="the schema 4000000000 is not in the schema registry"):
        registry.reader(b"\0" + (4_000_000_000).to_bytes(4, "big"))


def test_the_consumer_reads_what_confluents_protobuf_serializer_sends(apicurio: Apicurio) -> None:
    """Guards against an answer about a file of Protobuf that only the fake registry gives."""
    client = SchemaRegistryClient({"url": apicurio.url})
    placed = _placed()
    context = SerializationContext("of-others", MessageField.VALUE)
    value = ProtobufSerializer(placed, client)(placed(n=1, lines=[{"sku": "a"}]), context)
    frame, body = framed(value, {}) or (b"", b"")
    read = SchemaRegistry(apicurio.url).reader(frame)
    assert read is not None
    found = read(body)
    assert (found["n"], found["lines"]) == (1, [{"sku": "a"}])


_PROTOBUF_JARS: Final = ("com.google.protobuf:protobuf-java-util:4.33.6",)
_PROTOBUF_JAVA: Final = """
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.CodedInputStream;
import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.*;
import com.google.protobuf.util.JsonFormat;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;

public class Main {
    static String at;
    static Map<String, FileDescriptor> known = new HashMap<>();

    static JsonObject get(String path) throws Exception {
        URI uri = URI.create(at + path);
        String answer = HttpClient.newHttpClient().send(
            HttpRequest.newBuilder(uri).build(), HttpResponse.BodyHandlers.ofString()).body();
        return JsonParser.parseString(answer).getAsJsonObject();
    }

    static FileDescriptor file(JsonObject schema) throws Exception {
        if (schema.has("references")) for (var each : schema.getAsJsonArray("references")) {
            JsonObject one = each.getAsJsonObject();
            String subject = java.net.URLEncoder.encode(one.get("subject").getAsString(), "UTF-8");
            known.put(one.get("name").getAsString(),
                file(get("/subjects/" + subject + "/versions/" + one.get("version").getAsInt())));
        }
        FileDescriptorProto proto = FileDescriptorProto.parseFrom(
            Base64.getDecoder().decode(schema.get("schema").getAsString()));
        List<FileDescriptor> imports = new ArrayList<>();
        for (String name : proto.getDependencyList()) imports.add(known.get(name));
        return FileDescriptor.buildFrom(proto, imports.toArray(new FileDescriptor[0]));
    }

    public static void main(String[] args) throws Exception {
        at = args[0];
        for (FileDescriptor each : List.of(
            TimestampProto.getDescriptor(), DurationProto.getDescriptor(), StructProto.getDescriptor(),
            WrappersProto.getDescriptor(), AnyProto.getDescriptor())) known.put(each.getName(), each);
        ByteBuffer value = ByteBuffer.wrap(HexFormat.of().parseHex(args[1]));
        if (value.get() != 0) throw new Exception("no frame");
        FileDescriptor file = file(get("/schemas/ids/" + value.getInt()));
        CodedInputStream input = CodedInputStream.newInstance(value);
        int count = input.readSInt32();
        Descriptor message = file.getMessageTypes().get(count == 0 ? 0 : input.readSInt32());
        for (int n = 1; n < count; n++) message = message.getNestedTypes().get(input.readSInt32());
        DynamicMessage read = DynamicMessage.parseFrom(message, input);
        System.out.println(message.getFullName() + " " + read.getUnknownFields().asMap().size());
        System.out.println(JsonFormat.printer().omittingInsignificantWhitespace().print(read));
    }
}
"""


def test_protobufs_own_java_reads_what_the_relay_sends(
    apicurio: Apicurio, outbox: Outbox, tmp_path: Path
) -> None:
    """Guards against Protobuf, an index or a schema that Python alone understands."""
    (tmp_path / "shop.binpb").write_bytes(descriptor_set())
    given = tmp_path / "catalog.yaml", "protobuf", "value", _IN_PROTOBUF, _OF_PROTOBUF
    value = _published(outbox, apicurio, *given).value() or b""
    name, found = _of_java(tmp_path, _PROTOBUF_JAVA, _PROTOBUF_JARS, apicurio.url, value.hex())
    assert name == f"{MESSAGE} 0"
    read = json.loads(found)
    for line in read["lines"]:
        line |= {"n": int(line["n"])} if "n" in line else {}
    assert read == {**_OF_PROTOBUF, "big": str(2**53 + 1)}


def _of_java(folder: Path, program: str, names: tuple[str, ...], *arguments: str) -> list[str]:
    """Compile and run a program, with these jars and what they need; return its lines."""
    for tool in ("java", "javac"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is missing: install it and add it to PATH", pytrace=False)
    classes = f"{folder}:{jars.jars(names, load_settings().local_jars)}/*"
    (folder / "Main.java").write_text(program)
    subprocess.run(["javac", "-cp", classes, "Main.java"], cwd=folder, check=True)
    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-cp", classes, "Main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


_AVRO: Final = ("org.apache.avro:avro:1.12.2", "org.slf4j:slf4j-nop:2.0.17")
_JAVA: Final = """
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.ByteArrayOutputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import org.apache.avro.Conversions;
import org.apache.avro.Schema;
import org.apache.avro.data.TimeConversions;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.io.EncoderFactory;

public class Main {
    public static void main(String[] args) throws Exception {
        ByteBuffer value = ByteBuffer.wrap(HexFormat.of().parseHex(args[1]));
        if (value.get() != 0) throw new Exception("no frame");
        URI at = URI.create(args[0] + "/schemas/ids/" + value.getInt());
        String answer = HttpClient.newHttpClient().send(
            HttpRequest.newBuilder(at).build(), HttpResponse.BodyHandlers.ofString()).body();
        Schema schema = new Schema.Parser().parse(new ObjectMapper().readTree(answer).get("schema").asText());
        byte[] body = new byte[value.remaining()];
        value.get(body);
        GenericData data = new GenericData();
        data.addLogicalTypeConversion(new Conversions.DecimalConversion());
        data.addLogicalTypeConversion(new Conversions.UUIDConversion());
        data.addLogicalTypeConversion(new TimeConversions.DateConversion());
        data.addLogicalTypeConversion(new TimeConversions.TimestampMicrosConversion());
        GenericRecord record = (GenericRecord) new GenericDatumReader<Object>(schema, schema, data)
            .read(null, DecoderFactory.get().binaryDecoder(body, null));
        for (String name : "total at day id state price note_2d_1 lines of".split(" ")) {
            System.out.println(record.get(name));
        }
        ByteArrayOutputStream written = new ByteArrayOutputStream();
        BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(written, null);
        new GenericDatumWriter<Object>(schema, data).write(record, encoder);
        encoder.flush();
        System.out.println(HexFormat.of().formatHex(written.toByteArray()));
    }
}
"""


def test_avros_own_java_reads_what_the_relay_sends(
    apicurio: Apicurio, outbox: Outbox, tmp_path: Path
) -> None:
    """Guards against Avro as fastavro alone understands it."""
    given = tmp_path / "catalog.yaml", "avro", "value", _IN_AVRO, _PAYLOAD
    value = _published(outbox, apicurio, *given).value() or b""
    assert _of_java(tmp_path, _JAVA, _AVRO, apicurio.url, value.hex()) == [
        *("-12.50", "2026-11-27T09:30:00.250Z", "2026-11-27", _ID, "paid", "0.125", "ö"),
        '[{"n": -9223372036854775808, "sku": "a"}, {"n": null, "sku": "b"}]',
        *("null", value[5:].hex()),
    ]
