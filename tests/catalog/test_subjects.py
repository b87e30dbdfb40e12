"""What a schema registry has of the event catalog."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.catalog.subjects import Subjects, document
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import make_settings
from tests.catalog.conftest import Write
from tests.formats.protobuf.shop import MESSAGE, descriptor_set

_ENTRY = "{description: x, producer: x, owner: x, aggregate_type: order, schema: {type: object}}"
_EVENTS = f"""
events:
  placed: {_ENTRY}
  paid: {_ENTRY}
  gone: {_ENTRY.replace("schema", "lifecycle: retired, schema")}
  bare: {_ENTRY.replace("schema: {type: object}", "lifecycle: proposed")}
  any: {_ENTRY.replace("aggregate_type: order, ", "")}
"""


def _subjects(write: Write, events: str = _EVENTS, **given: Any) -> Subjects:
    base = {"registry_url": "http://x", "catalog_file": "x", "format": "json_schema"}
    return Subjects(read_catalog(write(events)), make_settings(**base | given))


def test_each_type_with_a_schema_has_a_subject(write: Write) -> None:
    """Guards against a type that is passed over in silence, and a retired one that blocks the others."""
    found = _subjects(write)
    names = {name: each.name for name, each in found.of_event_types.items()}
    assert names == {"placed": "order-events-placed", "paid": "order-events-paid"}
    assert "has no schema" in found.missing.pop("bare")
    assert "has no aggregate_type" in found.missing.pop("any")
    assert not found.missing
    assert set(_subjects(write, registry_subjects="record").of_event_types) == {"placed", "paid", "any"}
    # The topic of such a type is known.
    assert _subjects(write, topic="all").of_event_types["any"].name == "all-any"


def test_rules_choose_the_types(write: Write) -> None:
    """Guards against a migration of one type that takes all of them along."""
    found = _subjects(write, format="json", event_types={"paid": {"format": "json_schema"}})
    assert set(found.of_event_types) == {"paid"}
    assert not found.missing


def test_messages_of_a_file_of_protobuf_share_a_subject(write: Write) -> None:
    """Guards against a file that is refused for its second message, and a type that is passed over."""
    path = write(
        _EVENTS.replace("schema: {type: object}", "protobuf: {file: shop.binpb, message: shop.v1.First}")
    )
    (path.parent / "shop.binpb").write_bytes(descriptor_set())
    path.write_text(path.read_text().replace("shop.v1.First", MESSAGE, 1))
    base = {"registry_url": "http://x", "catalog_file": "x", "format": "protobuf"}
    settings = make_settings(**base, registry_subjects="topic")
    found = Subjects(read_catalog(path), settings)
    placed, paid = found.of_event_types["placed"], found.of_event_types["paid"]
    assert (placed.name, placed.text, placed.kind) == (paid.name, paid.text, "PROTOBUF")
    assert (placed.message, paid.message) == (MESSAGE, "shop.v1.First")
    assert [each.name for each in placed.imports] == ["shop/common.proto"]
    path.write_text(path.read_text().replace("shop.v1.First", "shop.v1.Gone", 1))
    found = Subjects(read_catalog(path), settings)
    assert "its file has no message shop.v1.Gone: give its full name" in found.missing["paid"]
    assert "has no protobuf in the event catalog" in found.missing["bare"]
    (path.parent / "shop.binpb").unlink()
    with pytest.raises(ValueError, match=r"placed: protobuf file shop\.binpb cannot be read"):
        read_catalog(path)
    with pytest.raises(ValueError, match="placed: protobuf is not a mapping: write"):
        read_catalog(write(_EVENTS.replace("schema: {type: object}", "protobuf: shop.binpb")))


def test_a_subject_has_one_type(write: Write) -> None:
    """Guards against two types that replace each other's schema in every registration."""
    with pytest.raises(SetupError, match="order-events-value would have the schemas of placed, paid"):
        _subjects(write, registry_subjects="topic")
    own = {"paid": {"topic": "payments"}}
    found = _subjects(write, registry_subjects="topic", event_types=own).of_event_types
    assert (found["placed"].name, found["paid"].name) == ("order-events-value", "payments-value")


@pytest.mark.parametrize(
    ("schema", "draft"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "draft-07"),
        ({"properties": {"a": {"$ref": "#/$defs/b", "description": "x"}}}, "draft-07"),
        ({"enum": [{"prefixItems": 1}]}, "draft-07"),
        ({"properties": {"a": {"$ref": "#/$defs/b", "minimum": 1}}}, "2020-12"),
        ({"properties": {"a": {"prefixItems": [{"type": "string"}]}}}, "2020-12"),
        ({"unevaluatedProperties": False}, "2020-12"),
        ({"$schema": "https://json-schema.org/draft/2019-09/schema"}, "2019-09"),
    ],
)
def test_the_document_names_its_draft(schema: dict[str, Any], draft: str) -> None:
    """Guards against a document that means something else in the draft that it names."""
    found = json.loads(document("placed", schema))
    assert draft in found.pop("$schema")
    assert found.pop("title") == "placed"
    assert found == {key: value for key, value in schema.items() if key != "$schema"}


def test_the_order_of_members_is_no_change() -> None:
    """Guards against another version of each schema after the file was sorted."""
    assert document("a", {"b": 1, "c": {"e": 1, "d": 2}}) == document("a", {"c": {"d": 2, "e": 1}, "b": 1})


_VERSIONS = _EVENTS.replace(
    "placed: {", "placed: {version: 3, versions: {2: {title: two}, 1: {type: string}}, ", 1
)


def test_each_version_has_a_document_of_its_own(write: Write) -> None:
    """Guards against an earlier version that is taken for another type, or registered behind a later one."""
    found = _subjects(write, _VERSIONS)
    names = {name: (each.name, each.event_type) for name, each in found.of_event_types.items()}
    assert [*names] == ["placed@1", "placed@2", "placed", "paid"]
    assert set(names.values()) == {("order-events-placed", "placed"), ("order-events-paid", "paid")}
    assert found.newest == {"placed": 3}
    texts = [json.loads(each.text) for each in found.of_event_types.values()]
    assert [each.get("type") for each in texts] == ["string", None, "object", "object"]
    assert {each["title"] for each in texts} == {"placed", "paid"}
    own = {"paid": {"topic": "payments"}}
    assert len(_subjects(write, _VERSIONS, registry_subjects="topic", event_types=own).of_event_types) == 4
    found = _subjects(write, _VERSIONS, format="avro")
    assert "has no Avro schema" in found.missing["placed@2"]


def test_a_message_of_protobuf_is_that_of_all_versions(write: Write) -> None:
    """Guards against an earlier version that has no subject, and events of it that are rejected."""
    path = write(
        _VERSIONS.replace("schema: {type: object}", "protobuf: {file: shop.binpb, message: shop.v1.First}")
    )
    (path.parent / "shop.binpb").write_bytes(descriptor_set())
    found = _subjects(write, path.read_text(), format="protobuf")
    assert ([*found.of_event_types], found.newest) == (["placed", "paid"], {})
