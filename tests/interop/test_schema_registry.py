"""A real schema registry: what `outbox catalog register` does there, and what Confluent's client reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from outbox_pipelines.cli.main import cli
from outbox_pipelines.errors import SetupError
from outbox_pipelines.registry import Registry, Subject
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings, make_settings
from outbox_pipelines.writer import emit
from tests import kafka_clients
from tests.conftest import Outbox
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

    def __init__(self, path: Path, apicurio: Apicurio, topic: str) -> None:
        self.path = path
        self._environment = {
            "OUTBOX_REGISTRY_URL": apicurio.url,
            "OUTBOX_CATALOG_FILE": str(path),
            "OUTBOX_FORMAT": "json_schema",
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


@pytest.mark.parametrize("framing", ["value", "header"])
def test_confluents_client_reads_what_the_relay_sends(
    apicurio: Apicurio, outbox: Outbox, tmp_path: Path, framing: str
) -> None:
    """Guards against messages that only our own consumer reads."""
    create_topic(outbox)
    catalog = Catalog(tmp_path / "catalog.yaml", apicurio, outbox.settings.topic)
    assert catalog.register(_EVENTS).exit_code == 0
    settings = outbox.settings.model_copy(
        update={
            **{"format": "json_schema", "registry_url": apicurio.url, "catalog_file": catalog.path},
            "registry_framing": framing,
        }
    )
    with outbox.connect(autocommit=False) as connection:
        emit(connection, "order", 7, "order.placed", {"total": 5, "lines": [{"sku": "a"}]})
    service.relay(settings, until_empty=True)
    deserialize = JSONDeserializer(
        None,
        schema_registry_client=SchemaRegistryClient({"url": apicurio.url}),
        conf={"schema.id.deserializer": dual_schema_id_deserializer},
    )
    consumer = kafka_clients.Consumer({"bootstrap.servers": settings.kafka, "group.id": "x"})
    topic = outbox.topic()
    partitions = consumer.list_topics(topic, timeout=60).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in partitions])
    message = consumer.poll(60)
    assert message is not None
    context = SerializationContext(topic, MessageField.VALUE, message.headers())
    assert deserialize(message.value(), context) == {"total": 5, "lines": [{"sku": "a"}]}
    consumer.close()
