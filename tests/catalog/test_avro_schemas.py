"""Avro schemas that are derived from the JSON Schemas of the event catalog."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outbox_pipelines.catalog.avro_schemas import NoEquivalentError, document

_LINE = {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}}


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(document("order.placed", schema))["fields"]}


def test_a_member_is_a_field() -> None:
    """Guards against a required member that may be left out, and an optional one that must be there."""
    found = _fields(
        {
            "required": ["count", "state", "gap", "line", "name", "tags", "at", "either"],
            "properties": {
                "note": {"type": "string", "description": "Free text.", "default": "none"},
                "gap": {"type": ["integer", "null"], "default": None},
                "count": {"type": "integer", "default": 3},
                "state": {"enum": ["new", "paid"], "default": "new"},
                "name": {"type": "string", "default": 3},
                "tags": {"type": "array", "items": {"type": "string"}, "default": []},
                "at": {"type": "string", "format": "date", "default": "2026-11-27"},
                "line": _LINE,
                "un-named": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "never": False,
                "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    )
    assert found["note"] == {
        **{"name": "note", "type": ["null", "string"], "default": None, "doc": "Free text."}
    }
    assert found["gap"] == {"name": "gap", "type": ["null", "long"], "default": None}
    assert found["count"] == {"name": "count", "type": "long", "default": 3}
    assert found["state"]["type"] == {
        "type": "enum",
        "name": "order.placed_state",
        "symbols": ["new", "paid"],
    }
    assert (found["state"]["default"], found["tags"]["default"]) == ("new", [])
    # What is no value of Avro's type is left out.
    assert "default" not in found["name"]
    assert "default" not in found["at"]
    assert found["line"]["type"]["name"] == "order.placed_line"
    assert found["un_2d_named"] == {
        **{"name": "un_2d_named", "json_name": "un-named", "type": ["null", "boolean"], "default": None}
    }
    assert found["either"] == {"name": "either", "type": ["null", "string"]}
    assert [*found] == [
        "at",
        "count",
        "either",
        "gap",
        "line",
        "name",
        "note",
        "state",
        "tags",
        "un_2d_named",
    ]


def test_a_definition_is_one_type() -> None:
    """Guards against a schema that defines a name twice, which no reader takes, or never ends."""
    found = _fields(
        {
            "properties": {
                "first": {"$ref": "#/$defs/line"},
                "all": {"type": "array", "items": {"$ref": "#/$defs/line", "description": "One."}},
                "again": {"$ref": "#"},
                "tree": {"$ref": "#/$defs/tree"},
            },
            "$defs": {
                "line": _LINE,
                "tree": {"type": "object", "additionalProperties": {"$ref": "#/$defs/branch"}},
                "branch": {"properties": {"tree": {"$ref": "#/$defs/tree"}}},
            },
        }
    )
    # In the order of the fields.
    assert found["all"]["type"][1]["items"]["name"] == "order.placed_line"
    assert found["first"]["type"] == ["null", "order.placed_line"]
    assert found["again"]["type"] == ["null", "order.placed"]
    branch = found["tree"]["type"][1]["values"]
    assert branch["name"] == "order.placed_branch"
    assert branch["fields"][0]["type"][1] == {"type": "map", "values": "order.placed_branch"}


def test_what_is_beside_a_reference_counts() -> None:
    """Guards against a member that is required where a definition is used, and may be absent in Avro."""
    base = {"properties": {"sku": {"type": "string"}}}
    used = {"$ref": "#/$defs/base", "required": ["sku"]}
    [_, found] = _fields({"properties": {"a": used}, "$defs": {"base": base}})["a"]["type"]
    assert (found["name"], found["fields"]) == ("order.placed_a", [{"name": "sku", "type": "string"}])


def test_the_order_of_members_is_no_change() -> None:
    """Guards against another id of each schema after the file was sorted."""
    members = {"a": {"type": "string"}, "b": _LINE}
    turned = {"b": {**_LINE, "title": "x"}, "a": {"type": "string"}}
    assert document("x", {"properties": members}) == document("x", {"properties": turned})


@pytest.mark.parametrize(
    ("event_type", "name"),
    [
        ("order.placed", "order.placed"),
        ("order-placed", "order_2d_placed"),
        ("größe.1", "gr_f6__df_e._1"),
        ("null", "null_"),
    ],
)
def test_the_name_is_the_event_type(event_type: str, name: str) -> None:
    """Guards against a name that Avro refuses."""
    assert json.loads(document(event_type, _LINE))["name"] == name


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({}, "payload: any value: name a type"),
        ({"type": "object"}, "payload: an object with any members: describe them"),
        ({"properties": {"a": {"items": {}}}}, r"payload\.a\[\]: any value"),
        ({"properties": {"a": True}}, r"payload\.a: any value"),
        ({"properties": {"a": {"type": "array"}}}, r"payload\.a: an array of any values"),
        ({"properties": {"a": {"allOf": [{"type": "string"}]}}}, r"payload\.a: allOf has no equivalent"),
        ({"type": "array", "prefixItems": [{"type": "string"}]}, "payload: prefixItems has no equivalent"),
        ({"properties": {"a": _LINE}, "additionalProperties": {"type": "string"}}, "payload: additionalProp"),
        ({"additionalProperties": {}}, "payload: any value"),
        ({"type": "object", "additionalProperties": {}}, "payload: an object with any members"),
        ({"required": ["b"], "properties": {"a": _LINE}}, r"payload\.b: is required and has no type"),
        ({"enum": [{"a": 1}]}, "payload: an enum of objects"),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "payload: several types that a value in JSON"),
        (
            {"anyOf": [_LINE, {"properties": {"b": _LINE}}]},
            "payload: its name in Avro, order.placed, is another",
        ),
        ({"anyOf": [{"type": "string"}, {"type": "string", "format": "date"}]}, "payload: several types"),
        ({"anyOf": [{"minimum": 1}], "type": "integer"}, "payload: anyOf beside a type"),
        ({"properties": {"a-b": {"const": 1}, "a_2d_b": {"const": 1}}}, "a-b and a_2d_b have the same name"),
        (
            {"properties": {"a": {"properties": {"b": _LINE}}, "a_b": {"properties": {"c": _LINE}}}},
            r"payload\.a_b: its name in Avro, order.placed_a_b, is another type's",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
            "payload: a reference that leads to its",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
            "payload: an array or a map of itself",
        ),
        ({"type": "number", "multipleOf": 1e-40}, "payload: multipleOf has more than 38 decimals"),
    ],
)
def test_what_has_no_equivalent_is_refused(schema: dict[str, Any], says: str) -> None:
    """Guards against a schema that takes other payloads, and a refusal without its place."""
    with pytest.raises(NoEquivalentError, match=says):
        document("order.placed", schema)
