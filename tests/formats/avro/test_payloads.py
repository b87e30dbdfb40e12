"""Payloads in Avro and back, by schemas that are derived from JSON Schemas."""

from __future__ import annotations

import io
import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pytest
from fastavro._read_py import schemaless_reader as read_in_python

from outbox_pipelines.catalog import avro_schemas
from outbox_pipelines.catalog.avro_schemas import NoEquivalentError, document
from outbox_pipelines.core.misfits import MisfitError
from outbox_pipelines.formats.avro import decoding, encoding

_ID = "5d1b7c1e-3a54-5c0e-9b61-0d2f6c1f8a77"
_NODE = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}}}


def _of(**members: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*members], "properties": members}


def _as_others_read(text: str, content: bytes) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(content), json.loads(text), None)


@pytest.mark.parametrize(
    ("schema", "payload", "theirs", "ours"),
    [
        ({"type": "integer"}, "-9223372036854775808", -(1 << 63), None),
        ({"type": "integer"}, "5.0", 5, 5),
        ({"type": "number"}, "0.1", 0.1, None),
        ({"type": "number"}, "1e3", 1000.0, None),
        ({"type": "number"}, "1152921504606846976", float(1 << 60), float(1 << 60)),
        ({"type": ["integer", "number"]}, "1.5", 1.5, None),
        ({"type": "number", "enum": [1, 2]}, "2", 2, None),
        ({"type": "number", "multipleOf": 0.01}, "0e99", Decimal("0.00"), None),
        # More digits than a float has; of a string all are kept.
        (
            {"type": "number", "multipleOf": 0.01},
            "-123456789012345678901234567890.10",
            Decimal("-123456789012345678901234567890.10"),
            None,
        ),
        ({"type": "number", "multipleOf": 1}, "9" * 38, Decimal("9" * 38), None),
        ({"type": "number", "multipleOf": 0.05}, "-1.28", Decimal("-1.28"), None),
        (
            {"type": "string", "format": "decimal", "multipleOf": 0.001},
            f'"-{"9" * 35}.5"',
            Decimal(f"-{'9' * 35}.500"),
            f"-{'9' * 35}.500",
        ),
        ({"type": "string", "format": "decimal", "multipleOf": 0.01}, '"0"', Decimal("0.00"), "0.00"),
        ({"type": "string", "format": "decimal"}, '"1.50"', "1.50", None),
        (
            {"type": "string", "format": "date-time"},
            '"2026-11-27T01:30:00.12000000+02:00"',
            datetime(2026, 11, 26, 23, 30, 0, 120000, UTC),
            "2026-11-26T23:30:00.12Z",
        ),
        (
            {"type": "string", "format": "date-time"},
            '"0001-01-01t00:00:00z"',
            datetime(1, 1, 1, tzinfo=UTC),
            "0001-01-01T00:00:00Z",
        ),
        ({"type": "string", "format": "date"}, '"1969-12-31"', date(1969, 12, 31), None),
        ({"type": "string", "format": "uuid"}, f'"{_ID}"', UUID(_ID), None),
        ({"type": "string", "format": "email"}, '"a@ö"', "a@ö", None),
        ({"enum": ["EUR", "NOK"]}, '"NOK"', "NOK", None),
        ({"enum": ["new", "in progress"]}, '"in progress"', "in progress", None),
        ({"enum": [1, 2, None]}, "2", 2, None),
        ({"const": True}, "true", True, None),
        ({"type": "array", "items": {"type": ["integer", "null"]}}, "[1, null]", [1, None], None),
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{"a b": "c"}', {"a b": "c"}, None),
        ({"type": ["string", "integer", "boolean", "null"]}, "7", 7, None),
        ({"anyOf": [_of(a={"type": "string"}), {"type": "string"}]}, '{"a": "x"}', {"a": "x"}, None),
        (_of(**{"größe 1": {"type": "boolean"}}), '{"größe 1": true}', {"gr_f6__df_e_20_1": True}, None),
        (_of(**{"1": {"type": "null"}}), '{"1": null}', {"_1": None}, None),
        (_NODE, '{"n": 1, "next": {}}', {"n": 1, "next": {"n": None, "next": None}}, None),
        # A null of an optional member is its absence.
        (
            {"type": "object", "properties": {"a": {"type": ["null", "string"]}}},
            '{"a": null}',
            {"a": None},
            {},
        ),
        (_of(a={"type": ["null", "string"]}), '{"a": null}', {"a": None}, None),
    ],
)
def test_a_value_is_what_others_read_and_what_was_written(
    schema: dict[str, Any], payload: str, theirs: Any, ours: Any
) -> None:
    """Guards against values that other clients read in another way, and that change on their way."""
    text = document("order.placed", schema)
    content = encoding.writer(text)(payload)
    assert _as_others_read(text, content) == theirs
    found = decoding.reader(text)(content)
    wanted = json.loads(payload) if ours is None else ours
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("schema", "payload", "says"),
    [
        ({"type": "integer"}, "9223372036854775808", "payload does not fit the 64 bits"),
        ({"type": "integer"}, "1.5", "payload has decimals, and is an integer"),
        ({"type": "integer"}, "true", "payload is a boolean in place of an integer"),
        ({"type": "number"}, "0.12345678901234567890", "payload has more digits than a double"),
        ({"type": "number"}, "9007199254740993", "payload has more digits than a double"),
        ({"type": "number"}, f"1{'0' * 400}", "payload has more digits than a double"),
        ({"type": "number"}, "1" * 5000, "payload has more digits than a double"),
        ({"type": "number"}, "NaN", r"payload cannot be written \(ValueError\)"),
        ({"type": "number", "multipleOf": 0.01}, "1.001", "payload has more than 2 decimals"),
        ({"type": "number", "multipleOf": 0.01}, "1e-999999999", "payload has more than 2 decimals"),
        ({"type": "number", "multipleOf": 0.01}, "1e36", "payload has more than 36 digits before the point"),
        ({"type": "number", "multipleOf": 0.01}, "1e999999999", "payload has more than 36 digits"),
        ({"type": "number", "multipleOf": 0.01}, '"1"', "payload is a string in place of a number"),
        ({"type": "string", "format": "decimal", "multipleOf": 0.01}, '"1e2"', "payload is no decimal"),
        (
            {"type": "string", "format": "decimal", "multipleOf": 0.01},
            "1.5",
            "is a number in place of a string",
        ),
        (
            {"type": "string", "format": "date-time"},
            '"2026-11-27T09:30:00"',
            "payload is no time with an offset",
        ),
        (
            {"type": "string", "format": "date-time"},
            '"2026-11-27T09:30:00.1234567Z"',
            "more precise than micro",
        ),
        (
            {"type": "string", "format": "date-time"},
            '"2016-12-31T23:59:60Z"',
            "does not exist, or a leap second",
        ),
        ({"type": "string", "format": "date"}, '"20261127"', "payload is no day"),
        ({"type": "string", "format": "date"}, '"2026-02-30"', "payload is no day"),
        ({"type": "string", "format": "uuid"}, f'"{_ID[:-1]}g"', "payload is no UUID"),
        ({"type": "string"}, '"\\ud800"', r"payload cannot be written \(UnicodeEncodeError\)"),
        ({"enum": ["EUR"]}, '"NOK"', "payload is none of the values of its enum"),
        ({"enum": ["EUR"]}, "null", "payload is null in place of a string"),
        ({"type": ["string", "integer"]}, "null", "payload is null in place of a number or a string"),
        ({"type": ["string", "null"]}, "1", "payload is a number in place of a string"),
        (_of(a={"type": "string"}), "{}", r"payload\.a is missing"),
        (_of(a={"type": "string"}), '{"a": "", "b": 1}', r"payload\.b is not in the schema: add it"),
        (_of(a={"type": "string"}), "[]", "payload is an array in place of an object"),
        (
            {"type": "array", "items": _of(a={"type": "object", "additionalProperties": {"type": "string"}})},
            '[{"a": {}}, {"a": {"x y": 1}}]',
            r"payload\[1\]\.a\.x y is a number in place of a string",
        ),
        (_NODE, '{"next": ' * 3000 + "{}" + "}" * 3000, "payload is nested too deeply: at most 100 levels"),
        (_NODE, '{"next": ' * 101 + "{}" + "}" * 101, r"payload\.next is nested too deeply: at most 100"),
        ({"type": "integer"}, "1e999999999", "payload does not fit the 64 bits"),
        (_of(a={"type": "integer"}), '{"a": ' + "1" * 5000 + "}", r"payload\.a does not fit the 64 bits"),
        (_of(a={"type": "number"}), '{"a": ' + "1" * 5000 + "}", r"payload\.a has more digits than a double"),
        ({"type": "string"}, "a", r"payload cannot be written \(JSONDecodeError\)"),
    ],
)
def test_what_does_not_fit_is_named(schema: dict[str, Any], payload: str, says: str) -> None:
    """Guards against a value that is rounded, dropped or converted, and a refusal without its place."""
    with pytest.raises(MisfitError, match=says):
        encoding.writer(document("order.placed", schema))(payload)


_OTHERS: dict[str, Any] = {
    "type": "record",
    "name": "shop.Placed",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "raw", "type": "bytes"},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {"name": "cost", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {
            "name": "item",
            "type": [
                {"type": "record", "name": "A", "fields": [{"name": "x", "type": "Hash"}]},
                {"type": "record", "name": "B", "fields": [{"name": "x", "type": "string"}]},
            ],
        },
        {"name": "note", "type": ["null", "bytes"], "default": None},
        {"name": "kept", "type": ["null", "string"]},
        {"name": "rate", "type": "float"},
    ],
}


def test_schemas_of_others_are_read() -> None:
    """Guards against events of other producers that become dead letters, or values that are no JSON."""
    at = datetime(2026, 11, 27, 9, 30, tzinfo=UTC)
    given = {
        **{"at": at, "local": datetime(2026, 11, 27, 9, 30, 0, 5), "clock": 34_200_007, "raw": b"\xff"},
        **{"hash": b"ab", "cost": Decimal("-1.5"), "item": ("shop.B", {"x": "y"}), "note": None},
        **{"kept": None, "rate": 0.5},
    }
    content = io.BytesIO()
    fastavro.schemaless_writer(content, _OTHERS, given)
    read = decoding.reader(json.dumps(_OTHERS))
    assert read(content.getvalue()) == {
        **{"at": "2026-11-27T09:30:00Z", "local": "2026-11-27T09:30:00.000005", "clock": "09:30:00.007"},
        **{"raw": "/w==", "hash": "YWI=", "cost": "-1.50", "item": {"x": "y"}, "kept": None, "rate": 0.5},
    }
    for wrong in (content.getvalue()[:-1], content.getvalue() + b"\0", b""):
        with pytest.raises(ValueError, match="the bytes do not fit the schema"):
            read(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"type": "object"}',
        '{"type": "record", "name": "a", "fields": [{"name": "b", "type": "C"}]}',
        "7",
        '{"type": "array", "items": ' * 400 + '"int"' + "}" * 400,
    ],
)
def test_what_is_no_schema(text: str) -> None:
    """Guards against an error of fastavro that ends a consumer."""
    with pytest.raises(ValueError, match="is no Avro schema that can be read alone"):
        decoding.reader(text)


@pytest.mark.parametrize(
    "inner", [["null", "n"], "n", {"type": "array", "items": "n"}, {"type": "map", "values": ["null", "n"]}]
)
@pytest.mark.parametrize("step", [b"\2", b"\2\0\2"])
def test_a_value_nested_without_end(inner: Any, step: bytes) -> None:
    """Guards against bytes of others that exhaust the stack, and so end the process of a consumer."""
    read = decoding.reader(_dumped("n", inner))
    with pytest.raises(ValueError, match=r"is nested too deeply|the bytes do not fit the schema"):
        read(step * 200_000 + b"\0")
    with pytest.raises(ValueError, match="is nested too deeply"):
        decoding.reader(_dumped("n", ["null", "n"]))(b"\2" * 200_000 + b"\0")


def test_a_value_of_a_recursive_schema_is_read() -> None:
    """Guards against a usual depth that is refused, of which the depth in a consumer's thread is a part."""
    found = decoding.reader(_dumped("n", ["null", "n"]))(b"\2" * 100 + b"\0")
    for _ in range(100):
        found = found["c"]
    assert found == {"c": None}


def _dumped(name: str, inner: Any) -> str:
    return json.dumps({"type": "record", "name": name, "fields": [{"name": "c", "type": inner}]})


def test_a_union_that_json_does_not_tell_apart() -> None:
    """Guards against a day that is read as a time."""
    union = [{"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "timestamp-millis"}]
    with pytest.raises(ValueError, match="has a union of types that JSON does not tell apart"):
        decoding.reader(json.dumps(union))


@pytest.mark.parametrize(
    "items",
    [
        '"null"',
        '{"type": "fixed", "name": "a", "size": 0}',
        '{"type": "record", "name": "a", "fields": [{"name": "b", "type": "null"}]}',
    ],
)
def test_a_few_bytes_are_no_billions_of_items(items: str) -> None:
    """Guards against a message of ten bytes that occupies a consumer and its memory without end."""
    for text in (
        f'{{"type": "array", "items": {items}}}',
        '{"type": "record", "name": "r", "fields": ['
        f'{{"name": "x", "type": {items}}}, {{"name": "y", "type": {{"type": "array", "items": "a"}}}}]}}',
    ):
        if '"a"' not in items and '"items": "a"' in text:
            continue
        with pytest.raises(ValueError, match="has an array of items that take no bytes"):
            decoding.reader(text)
    with pytest.raises(NoEquivalentError, match=r"payload\.l\[\]: items that are all alike"):
        document("x", _of(l={"type": "array", "items": {"type": "null"}}))


def test_a_value_without_bytes_is_small() -> None:
    """Guards against a schema of a kilobyte whose one value, of no bytes, has billions of parts."""
    nested = '{"type": "record", "name": "r0", "fields": []}'
    for level in range(1, 6):
        fields = f'{{"name": "a", "type": {nested}}}, {{"name": "b", "type": "r{level - 1}"}}'
        nested = f'{{"type": "record", "name": "r{level}", "fields": [{fields}]}}'
    count = json.dumps(decoding.reader(nested)(b"")).count("{")
    assert count == 63
    bigger = (
        '{"type": "record", "name": "r", "fields": [{"name": "n", "type": "int"}, {"name": "a", "type": %s}'
    )
    assert decoding.reader(f"{bigger % nested}]}}")(b"\2")["n"] == 1
    with pytest.raises(ValueError, match="has a record with more than 100 parts that take no bytes"):
        decoding.reader(f'{bigger % nested}, {{"name": "b", "type": "r5"}}]}}')


def test_the_reader_in_python_is_there() -> None:
    """Guards against an upgrade of fastavro that changes what is private: pin it in pyproject.toml."""
    for one in (read_in_python, fastavro.schemaless_reader):
        stream = io.BytesIO(b"\2")
        assert one(stream, "int", None, return_named_type=True, return_named_type_override=True) == 1
    assert read_in_python.__code__.co_filename.endswith(".py")


def test_what_differs_is_named() -> None:
    """Guards against a registration that is refused without a reason."""
    lines = {"type": "array", "items": _of(n={"type": "integer"}, state={"enum": ["a", "b"]})}
    changed = {"type": "array", "items": _of(n={"type": "string"}, state={"enum": ["a"]}, m={"type": "null"})}
    old = document("placed", {**_of(lines=lines), "required": []})
    new = document("placed", {**_of(lines=changed), "required": []})
    assert avro_schemas.differences(old, new) == [
        "payload.lines[].m: is required now, without a default",
        "payload.lines[].n: long → string",
        "payload.lines[].state: b is no value any more",
    ]
    assert avro_schemas.differences(old, old) == []
    assert avro_schemas.differences("{", new) == ["that version is no Avro schema that can be read alone"]


class _Drawn:
    """A schema and payloads that fit it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def schema(self, depth: int = 0) -> dict[str, Any]:
        leaves: list[dict[str, Any]] = [
            *({"type": kind} for kind in ("integer", "number", "string", "boolean")),
            *({"type": "string", "format": each} for each in ("date", "date-time", "uuid")),
            {"type": "number", "multipleOf": self._chance.choice([1, 0.01, 1e-9])},
            {"enum": self._chance.choice([["a", "b"], ["a b", "c"]])},
            {"type": [self._chance.choice(["string", "integer"]), "null", "boolean"]},
        ]
        kind = self._chance.randrange(3 if depth < 3 else 1)
        if kind == 0:
            return self._chance.choice(leaves)
        if kind == 1:
            key, value = self._chance.choice(
                [("items", {"type": "array"}), ("additionalProperties", {"type": "object"})]
            )
            return {**value, key: self.schema(depth + 1)}
        names = self._chance.sample(["a", "b-c", "d é", "_e", "0"], self._chance.randint(1, 4))
        members = {name: self.schema(depth + 1) for name in names}
        return {"type": "object", "properties": members, "required": names[: self._chance.randint(0, 4)]}

    def payload(self, schema: dict[str, Any]) -> Any:
        chance = self._chance
        if "enum" in schema:
            return chance.choice(schema["enum"])
        kind = schema["type"]
        if isinstance(kind, list):
            kind = chance.choice(kind)
        if kind == "object" and "properties" in schema:
            return {
                name: self.payload(each)
                for name, each in schema["properties"].items()
                if name in schema["required"] or chance.random() < 0.5
            }
        if kind == "object":
            return {
                f"{n} é": self.payload(schema["additionalProperties"]) for n in range(chance.randrange(3))
            }
        if kind == "array":
            return [self.payload(schema["items"]) for _ in range(chance.randrange(4))]
        if kind == "number" and "multipleOf" in schema:
            # As many digits as a float has: what is read is one.
            return (
                chance.randint(-(10**6), 10**6) * schema["multipleOf"]
                if schema["multipleOf"] != 1e-9
                else 0.5
            )
        if kind == "string":
            return {
                "date": date.fromordinal(chance.randint(1, 3_000_000)).isoformat(),
                "date-time": datetime.fromtimestamp(chance.randint(-(10**9), 10**10), UTC).isoformat()[:19]
                + "Z",
                "uuid": str(UUID(int=chance.getrandbits(128))),
            }.get(schema.get("format", ""), "".join(map(chr, chance.sample(range(32, 0xD800), 3))))
        if kind == "integer":
            return chance.choice([0, -1, 63, 64, -64, -65, 2**63 - 1, -(2**63), chance.getrandbits(40)])
        values = {"boolean": chance.random() < 0.5, "number": chance.uniform(-1e9, 1e9), "null": None}
        return values[kind]


@pytest.mark.parametrize("drawn", [300, pytest.param(5_000, marks=pytest.mark.extended)])
def test_there_and_back(drawn: int) -> None:
    """Guards against combinations of types that the author did not think of; a seed names each."""
    for seed in range(drawn):
        draw = _Drawn(random.Random(seed))
        schema = draw.schema()
        payload = json.dumps(draw.payload(schema))
        # As jsonb prints it: with the digits that the number has.
        payload = json.dumps(json.loads(payload, parse_float=lambda text: round(float(text), 2)))
        text = document("order.placed", schema)
        content = encoding.writer(text)(payload)
        assert _without_nulls(decoding.reader(text)(content)) == _without_nulls(json.loads(payload)), seed
        # What others have read and write again is the same.
        again = io.BytesIO()
        fastavro.schemaless_writer(again, json.loads(text), _as_others_read(text, content))
        assert again.getvalue() == content, seed


def _without_nulls(payload: Any) -> Any:
    if isinstance(payload, list):
        return [_without_nulls(each) for each in payload]
    if isinstance(payload, dict):
        return {name: _without_nulls(each) for name, each in payload.items() if each is not None}
    return payload
