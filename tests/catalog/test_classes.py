"""`outbox catalog classes`: classes that write and read what the event catalog says, whatever it says."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from outbox_pipelines.catalog import classes as module_of_classes
from outbox_pipelines.catalog.classes import classes, is_current
from outbox_pipelines.catalog.document import Catalog, read_catalog
from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.consumer.errors import RefusedError
from outbox_pipelines.consumer.testing import handle, make_event
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer import emit
from outbox_pipelines.writer.testing import captured
from tests.catalog.conftest import CATALOG, Write
from tests.catalog.test_changes import _payload, _schema

ENTRY = {"description": "d", "producer": "p", "owner": "o"}
# It ends each kind of literal, and a comment.
CODE = '"""\'\'\'\\"""\n\'\nimport sys; sys.exit(7)\n#'
write_event: Any = emit
Make = Callable[[str], ModuleType]


def _catalog(**schemas: Any) -> Catalog:
    return Catalog.model_validate(
        {"events": {name.replace("__", "."): {**ENTRY, "schema": each} for name, each in schemas.items()}}
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Import a generated module. pydantic looks for its names in `sys.modules`."""

    def imported(text: str) -> ModuleType:
        made = ModuleType("generated_events")
        monkeypatch.setitem(sys.modules, made.__name__, made)
        exec(compile(text, "generated_events.py", "exec"), made.__dict__)
        return made

    return imported


ORDERS = """
events:
  order.placed:
    description: A customer has placed an order.
    producer: shop
    owner: o
    aggregate_type: order
    aggregate_id: order-id
    version: 2
    schema:
      type: object
      required: [order-id, lines]
      properties:
        order-id: {type: integer, minimum: 1}
        at: {type: string, format: date-time}
        price: {type: string, format: decimal}
        coupon: {type: string}
        remark: {type: [string, "null"]}
        lines: {type: array, items: {$ref: "#/$defs/line"}, minItems: 1}
        pay:
          oneOf:
            - {type: object, required: [card], properties: {card: {type: string}}}
            - {type: object, required: [voucher], properties: {voucher: {type: string, format: uuid}}}
      $defs:
        line:
          type: object
          required: [sku]
          additionalProperties: false
          properties: {sku: {type: string}, parts: {type: array, items: {$ref: "#/$defs/line"}}}
  order.paid:
    {description: d, producer: shop, owner: o, aggregate_type: order, schema: {type: integer}}
  order.gone: {description: d, producer: shop, owner: o, lifecycle: retired}
"""
PLACED = {
    "order-id": 7,
    "at": "2026-11-27T06:40:00Z",
    "price": "5.10",
    "lines": [{"sku": "a", "parts": [{"sku": "b"}]}],
    "pay": {"voucher": "00000000-0000-0000-0000-000000000007"},
}


def test_from_a_writer_to_a_consumer(write: Write, make: Make) -> None:
    """Guards against a class that writes other members, or another key, than the event catalog has."""
    catalog = read_catalog(write(ORDERS))
    made: Any = make(classes(catalog))
    order = made.OrderPlaced(
        order_id=7,
        at="2026-11-27T06:40:00Z",
        price="5.10",
        coupon=None,
        lines=[made.OrderPlacedLine(sku="a", parts=[made.OrderPlacedLine(sku="b")])],
        pay=made.OrderPlacedPay2(voucher="00000000-0000-0000-0000-000000000007"),
    )
    with captured() as events:
        write_event(None, order)
        write_event(None, order.model_copy(update={"remark": None}))
        write_event(None, made.OrderPaid(5), aggregate_id=7)
    first, second, paid = events
    assert (first.aggregate_type, first.aggregate_id, first.version, first.payload) == (
        "order",
        "7",
        2,
        PLACED,
    )
    assert second.payload == {**PLACED, "remark": None}
    assert (paid.event_type, paid.aggregate_id, paid.payload) == ("order.paid", "7", 5)
    assert not hasattr(made, "OrderGone")
    consumer = Consumer(source="s", topics=["t"], kafka={"bootstrap.servers": "broker:9092"}, dsn="")
    seen: list[Any] = []

    @consumer.on(made.OrderPlaced)
    def placed(event: Event, connection: object) -> None:
        seen.append(event.payload)

    handle(consumer, make_event("order.placed", {**PLACED, "added": 1}), using=None)
    assert seen == [order]
    for wrong in ({"order_id": 0, "lines": order.lines}, {"order_id": 1, "lines": []}, {"order_id": 1}):
        with pytest.raises(ValidationError):
            made.OrderPlaced(**wrong)


def test_each_version_has_a_class_of_its_own(write: Write, make: Make) -> None:
    """Guards against an event of an earlier version that is read, or written, as one of the newest."""
    versions = """    version: 3
    deliver_after: PT1H
    versions:
      1: {type: object, required: [total], properties: {total: {type: integer}}}
      2: {type: object, required: [order-id], properties: {order-id: {type: integer}, sum: {type: integer}}}
"""
    catalog = read_catalog(write(ORDERS.replace("    version: 2\n", versions)))
    text = classes(catalog)
    assert is_current(catalog, text)
    assert not is_current(
        read_catalog(write(ORDERS.replace("    version: 2\n", versions.replace("sum", "x")))), text
    )
    made: Any = make(text)
    first, second = made.OrderPlacedV1, made.OrderPlacedV2
    assert [each.__event_version__ for each in (first, second, made.OrderPlaced)] == [1, 2, 3]
    assert {each.__event_type__ for each in (first, second, made.OrderPlaced)} == {"order.placed"}
    assert made.OrderPlaced.__deliver_after__ == timedelta(hours=1)
    # The first version has no member with the id.
    assert (hasattr(first, "__aggregate_id__"), second.__aggregate_id__) == (False, "order_id")
    consumer = Consumer(source="s", topics=["t"], kafka={"bootstrap.servers": "broker:9092"}, dsn="")
    seen: list[Any] = []

    @consumer.on(made.OrderPlaced, first, second)
    def placed(event: Event, connection: object) -> None:
        seen.append(event.payload)

    for version, payload in (
        (1, {"total": 5}),
        (2, {"order-id": 7, "sum": 5}),
        (3, PLACED),
        (None, PLACED),
        (4, PLACED),
    ):
        handle(consumer, make_event("order.placed", payload, version=version), using=None)
    assert [type(each) for each in seen] == [first, second, *[made.OrderPlaced] * 3]
    with pytest.raises(RefusedError, match="its payload is not a valid OrderPlacedV1"):
        handle(consumer, make_event("order.placed", PLACED, version=1), using=None)


NAMES = [
    *(
        "class",
        "None",
        "order-id",
        "order_id",
        "",
        "_x",
        "__event_type__",
        "__nullable__",
        "größe",
        "x\u202ey",
    ),
    *(
        "model_config",
        "model_fields",
        "model_fields_set",
        "_written",
        "self",
        "json",
        "copy",
        "schema",
        "fields",
    ),
    *(
        "int",
        "str",
        "float",
        "bool",
        "list",
        "dict",
        "date",
        "Any",
        "UUID",
        "Decimal",
        "Literal",
        "Annotated",
    ),
    *("Field", "AwareDatetime", "ClassVar", "frozenset", "Payload", "RootModel", "A", "type", CODE),
]
TYPES = {
    "Order2ePlaced": "order.placed",
    "Order2dPlaced": "order-placed",
    "OrderPlacedLine": "order.placed.line",
    "NoneEvent": "None",
    "DecimalEvent": "decimal",
    "PayloadEvent": "payload",
    "ModelEvent": "model",
    "Event2fa": "2fa",
    "Event2e2e2e": "...",
    "GrößeGeändert": "größe.geändert",
    "日本": "日本",
    "A": "a",
    "ImportSysSysExit7": CODE,
}


def test_texts_never_become_code(make: Make) -> None:
    """Guards against a name, a description or a value of the event catalog that is executed, or that makes
    a module which cannot be imported."""
    kinds: list[Any] = [
        {"type": "integer", "description": CODE},
        {"enum": [CODE, "a", None]},
        {"type": ["string", "null"], "format": "date"},
        {"type": "object", "title": CODE, "default": CODE, "properties": {CODE: {"const": CODE}}},
    ]
    properties = {name: kinds[at % len(kinds)] for at, name in enumerate(NAMES)}
    values: list[Any] = [1, CODE, "2026-11-27", {CODE: CODE}]
    schema = {"type": "object", "required": ["order-id"], "properties": properties}
    entry = {
        **ENTRY,
        "description": CODE,
        "aggregate_type": CODE,
        "aggregate_id": "order-id",
        "schema": schema,
    }
    made: Any = make(classes(Catalog.model_validate({"events": dict.fromkeys(TYPES.values(), entry)})))
    assert {each: getattr(made, each).__event_type__ for each in TYPES} == TYPES
    payload = {name: values[at % len(values)] for at, name in enumerate(NAMES)}
    order = made.Order2ePlaced.model_validate(payload)
    assert order.model_dump(mode="json") == order.model_dump(mode="json", by_alias=True) == payload
    key = getattr(order, order.__aggregate_id__)
    assert (order.__aggregate_type__, str(key)) == (CODE, payload["order-id"])


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "from os import path\nclass E(path):\n    a: int",
        "f()",
        "class A:\n    a: int = f()",
        "lambda: 1",
        "x: int = [y for y in z]",
    ],
)
def test_a_module_with_other_code_is_refused(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a generator, of another version perhaps, that lets a text become code."""
    generated = module_of_classes._generated
    monkeypatch.setattr(module_of_classes, "_generated", lambda shapes: f"{generated(shapes)}\n{code}\n")
    if code.startswith("class"):
        code = code.replace("class A", "class E")
    with pytest.raises(SetupError, match="report this"):
        classes(_catalog(e={"type": "object"}))


@pytest.mark.parametrize(
    "text", ["Plain.", "ends with \\", 'ends with "', "two\n\nparagraphs", "a\u202eb", CODE]
)
def test_a_description_is_a_docstring(text: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a docstring that ends where its text says."""
    monkeypatch.setattr(module_of_classes, "_generated", lambda shapes: "class E(Payload):\n    pass\n")
    catalog = Catalog.model_validate({"events": {"e": {**ENTRY, "description": text, "schema": {}}}})
    assert inspect.cleandoc(make(classes(catalog)).E.__doc__) == text


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
NODE = {"type": ["object", "null"], "properties": {"next": {"$ref": "#/$defs/node"}}}
# Of each schema a payload that fits it, and one that the class refuses.
KEYWORDS: list[tuple[Any, Any, Any]] = [
    (A | {"additionalProperties": False, "patternProperties": {"^x": {}}}, {"a": 1, "x1": 2}, {"a": "b"}),
    (A | {"additionalProperties": False}, {"a": 1}, {"b": 1}),
    (A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 7}, {"a": "b"}),
    (A | {"additionalProperties": {"type": "integer"}}, {"a": 1, "z": 2}, []),
    (A | {"required": ["b"]}, {"b": [1]}, {"a": 1}),
    ({"type": "object", "required": ["a", "b"], "properties": {"a": False, "b": {}}}, None, {}),
    ({"type": "object", "properties": {"a": False, "b": {"type": "integer"}}}, {"b": 1}, {"b": "c"}),
    ({"allOf": [A, {"required": ["b"], "properties": {"b": {"enum": ["x"]}}}]}, {"a": 1, "b": "x"}, {"a": 1}),
    ({"type": "array", "items": {"type": "integer", "minimum": 3}}, [3], ["a"]),
    ({"type": "array", "items": {"type": ["integer", "null"], "minimum": 3}}, [3, None], ["a"]),
    ({"type": "object", "additionalProperties": {"type": "integer", "minimum": 3}}, {"a": 3}, {"a": "b"}),
    ({"enum": [1, 2.5, "a", {}]}, 2.5, NotImplemented),
    ({"enum": [1, "a"]}, "a", "b"),
    ({"type": "array", "anyOf": [{"minItems": 1}, {"maxItems": 3}]}, [1], {"a": 1}),
    ({"type": ["string", "integer"], "maxLength": 3}, "abc", []),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}}, {"next": {"next": {}}}, {"next": 1}),
    ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, {"next": {"next": None}}, {"next": 1}),
    ({"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}, [[[]]], {}),
    ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"type": "null"}]}, {"a": 1}, {"a": 2}),
]


def test_each_keyword(make: Make) -> None:
    """Guards against a keyword that makes a class lose members, or be no class at all."""
    made: Any = make(
        classes(_catalog(**{f"t{number}": schema for number, (schema, *_) in enumerate(KEYWORDS)}))
    )
    for number, (schema, payload, wrong) in enumerate(KEYWORDS):
        kind = getattr(made, f"T{number}")
        if payload is not None:
            assert Draft202012Validator(schema).is_valid(payload)
            assert kind.model_validate(payload).model_dump(mode="json") == payload, schema
        if wrong is not NotImplemented:
            with pytest.raises(ValidationError):
                kind.model_validate(wrong)
    tree = made.T15.model_validate({"next": {}})
    assert type(tree.next) is made.T15


def test_event_types_of_one_class() -> None:
    """Guards against one of two types that is left out: composed letters make one identifier."""
    with pytest.raises(SetupError, match="would have one class, Fin: rename an event type"):
        classes(_catalog(**{"fin": {}, "\ufb01n": {}}))


def test_schemas_and_payloads_drawn_at_random(make: Make) -> None:
    """Guards against a payload that fits its schema and that the class refuses, changes or loses."""
    random, compared = Random(7), 0
    schemas = {f"t{number}": _with_types(_schema(random)) for number in range(60)}
    made: Any = make(classes(_catalog(**schemas)))
    for name, schema in schemas.items():
        fits = Draft202012Validator(schema).is_valid
        for _ in range(100):
            payload = _payload(random)
            if fits(payload):
                kind = getattr(made, name.upper())
                written = kind.model_validate_json(json.dumps(payload)).model_dump(mode="json")
                assert fits(written), (schema, payload, written)
                assert _without_others(payload, written) == written, (schema, payload, written)
                compared += 1
    assert compared > 300


def _with_types(schema: Any) -> Any:
    """Return the schema with the type of its members: a class is for objects alone."""
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_types(each) for key, each in schema.items()}
    if isinstance(members := found.get("properties"), dict):
        found["properties"] = {key: _with_types(each) for key, each in members.items()}
        found.setdefault("type", "object")
    return found


def _without_others(payload: Any, written: Any) -> Any:
    """Return the payload without the members that a class does not have."""
    if isinstance(payload, list):
        return [_without_others(one, other) for one, other in zip(payload, written, strict=True)]
    if isinstance(payload, dict):
        return {
            name: _without_others(each, written[name]) for name, each in payload.items() if name in written
        }
    return payload


def test_the_command(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step in CI that passes whatever the file has, or fails without a change."""
    path, output = write(CATALOG), tmp_path / "events.py"

    def run(*options: str) -> tuple[int, str]:
        environment = {"OUTBOX_CATALOG_FILE": str(path)}
        done = CliRunner().invoke(cli, ["catalog", "classes", *options], env=environment)
        return done.exit_code, done.output

    assert run("--output", str(output)) == (0, f"{output}: classes of the event catalog\n")
    text = output.read_text()
    assert run() == (0, text)
    monkeypatch.setitem(sys.modules, "datamodel_code_generator", None)
    check = ("--check", "--output", str(output))
    assert run(*check) == (0, f"{output} is up to date\n")
    code, printed = run()
    assert (code, "pip install 'outbox-pipelines[classes]'" in printed) == (2, True)
    assert run("--check") == (2, "outbox: --check needs the file to compare: add --output FILE\n")
    for edited in (
        text.replace("total: ", "totals: "),
        text.replace("ruff: noqa", "ruff: no"),
        "",
        text + "\n",
    ):
        output.write_text(edited)
        code, printed = run(*check)
        assert (code, "is not what the event catalog says, or was edited: run" in printed) == (1, True), (
            edited
        )
    output.write_text(text)
    write(CATALOG.replace("minimum: 1", "minimum: 2"))
    assert run(*check)[0] == 1
    write(CATALOG.replace("team:order", "team:shop"))
    assert run(*check)[0] == 0
    output.unlink()
    assert run(*check)[0] == 2


def test_it_passes_ruff(write: Write, tmp_path: Path) -> None:
    """Guards against a file that an application's linter refuses."""
    (tmp_path / "events.py").write_text(classes(read_catalog(write(CATALOG))))
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "events.py"], cwd=tmp_path
    )
    assert done.returncode == 0
    assert is_current(read_catalog(write(CATALOG)), (tmp_path / "events.py").read_text())
