"""The event catalog as AsyncAPI: it describes what the relay sends. tests/interop validates it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator

from outbox_pipelines.catalog.asyncapi import document
from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.core.event import Event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay.kafka.message import Encoder
from outbox_pipelines.settings import load_settings
from tests.catalog.conftest import Write

EVENTS = """
events:
  order.placed:
    description: |
      A customer has placed an order.

      Written once.
    producer: shop
    owner: team:orders
    consumers: [billing]
    topic: orders
    schema:
      type: object
      required: [total]
      properties:
        total: {type: integer, minimum: 1}
        again: {$ref: "#"}
        same: {$ref: "#/properties/total"}
        lines: {type: array, items: {$ref: "#/$defs/a~1line", description: one}}
        constant: {const: {$ref: "#"}}
      $defs:
        a/line: {type: object, required: [sku], properties: {part: {$ref: "#/$defs/a~1line"}}}
  "a type/ö":
    description: x
    producer: shop
    owner: x
    lifecycle: deprecated
  order.gone: {description: x, producer: shop, owner: x, lifecycle: retired}
  order.paid: {description: x, producer: shop, owner: x, aggregate_type: Order}
"""
PAYLOAD = {"total": 5, "same": 3, "again": {"total": 1}, "lines": [{"sku": "a", "part": {"sku": "b"}}]}


def _references(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) and "/" in part["$ref"] else []
        return own + [each for value in part.values() for each in _references(value)]
    return [each for value in part for each in _references(value)] if isinstance(part, list) else []


@pytest.mark.parametrize("value_format", ["payload", "flat", "envelope", "cloudevents"])
def test_what_the_relay_sends_fits(write: Write, value_format: str) -> None:
    """Guards against a document that describes other messages than those in the topic."""
    settings = load_settings(value_format=value_format, header_names="event-type=type,version=")
    found = document(read_catalog(write(EVENTS)), settings, version="2")
    metadata = json.dumps({"created-at": "2026-01-01T00:00:00Z", "traceparent": "t"})

    def fits(payload: Any) -> tuple[bool, bool]:
        event = Event(1, "1", "order", "7", "order.placed", json.dumps(payload), metadata)
        value, headers = Encoder(settings).encode(event)
        message = found["components"]["messages"]["order.placed"]
        assert dict(headers).get("content-type", "application/json") == message["contentType"]
        checked = (message["payload"], json.loads(value or "")), (message["headers"], dict(headers))
        values = [Draft7Validator({**found, "allOf": [schema]}).is_valid(each) for schema, each in checked]
        return values[0], values[1]

    assert fits(PAYLOAD) == (True, True)
    for wrong in (
        *({}, {"total": 0}, {"total": 1, "same": 0}, {"total": 1, "again": {}}, {"total": 1, "lines": [{}]}),
        {"total": 1, "lines": [{"sku": "a", "part": {}}]},
    ):
        assert fits(wrong) == (False, True), wrong


def test_avro_is_described_as_avro(write: Write) -> None:
    """Guards against a document that describes JSON where the relay sends Avro."""
    settings = load_settings(registry_url="http://x", catalog_file="x", format="avro")
    events = EVENTS.replace("properties: {part:", "properties: {sku: {type: string}, part:")
    path = write(events.replace('        constant: {const: {$ref: "#"}}\n', ""))
    placed, *_, paid = document(read_catalog(path), settings, version="2")["components"]["messages"].values()
    assert placed["contentType"] == "application/vnd.apache.avro"
    assert placed["payload"]["schemaFormat"] == "application/vnd.apache.avro+json;version=1.9.0"
    assert placed["payload"]["schema"]["name"] == "order.placed"
    assert paid["contentType"] == "application/json"
    with pytest.raises(
        SetupError, match=r"order.placed has no Avro schema: payload\.constant: an enum of obj"
    ):
        document(read_catalog(write(events)), settings, version="2")


def test_topics_and_parts(write: Write) -> None:
    """Guards against a type in no channel, a reference to nothing, and a retired type that is offered."""
    settings = load_settings(name="shop", topic="x.{aggregate_type:lower}")
    found = document(read_catalog(write(EVENTS)), settings, version="2")
    assert (found["asyncapi"], found["info"]["title"], found["info"]["version"]) == (
        *("3.0.0", "Events of shop", "2"),
    )
    channels = {each["address"]: [*each["messages"]] for each in found["channels"].values()}
    assert channels == {
        "orders": ["order.placed"],
        "x.{aggregate_type}": ["a_20_type_2f__f6_"],
        "x.order": ["order.paid"],
    }
    for reference in _references(found):
        part: Any = found
        for step in reference.removeprefix("#/").split("/"):
            part = part[step]
    placed = found["components"]["messages"]["order.placed"]
    assert (placed["summary"], placed["x-consumers"]) == ("A customer has placed an order.", ["billing"])
    constant = found["components"]["schemas"]["order.placed"]["properties"]["constant"]
    assert constant == {"const": {"$ref": "#"}}
    assert found["components"]["messages"]["a_20_type_2f__f6_"]["tags"] == [{"name": "deprecated"}]


def test_each_version_is_a_message(write: Write) -> None:
    """Guards against a document that describes replayed events of an earlier version as new ones."""
    earlier = "version: 2\n    versions: {1: {type: string}}\n    consumers: [billing]"
    catalog = read_catalog(write(EVENTS.replace("consumers: [billing]", earlier)))
    found = document(catalog, load_settings(), version="2")["components"]
    assert [*found["messages"]][:2] == ["order.placed_40_1", "order.placed"]
    versions = [each["headers"]["properties"]["version"] for each in found["messages"].values()]
    assert versions[:3] == [{"const": "1"}, {"const": "2"}, {"type": "string"}]
    assert found["schemas"]["order.placed_40_1"] == {"type": "string"}
    document(catalog, load_settings(header_names="version="), version="2")
