"""`outbox catalog register`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli
from tests.catalog.conftest import Write
from tests.formats.protobuf.shop import descriptor_set
from tests.registry import FakeRegistry

pytestmark = pytest.mark.slow

_EVENTS = """
events:
  placed: {description: x, producer: x, owner: x, aggregate_type: order,
           schema: {type: object, required: [a], properties: {a: {}}}}
  paid: {description: x, producer: x, owner: x, aggregate_type: order, schema: {type: object}}
"""
# `placed` cannot follow the version before, and `paid` can.
_LATER = _EVENTS.replace("required: [a]", "required: [a, b]").replace("schema: {type: object}", "schema: {}")


def _run(
    registry: FakeRegistry, write: Write, events: str, *options: str, kind: str = "json_schema"
) -> Result:
    environment = {
        "OUTBOX_REGISTRY_URL": registry.url,
        "OUTBOX_CATALOG_FILE": str(write(events)),
        "OUTBOX_FORMAT": kind,
    }
    return CliRunner().invoke(cli, ["catalog", "register", *options], env=environment)


def _statuses(result: Result) -> dict[str, str]:
    return {each["event_type"]: each["status"] for each in json.loads(result.stdout)}


def test_schemas_are_registered_once(registry: FakeRegistry, write: Write) -> None:
    """Guards against a check that changes something, and a second version of what is registered."""
    result = _run(registry, write, _EVENTS, "--check", "--json")
    assert (result.exit_code, _statuses(result)) == (0, {"placed": "new", "paid": "new"})
    assert not registry.subjects
    assert not registry.levels
    result = _run(registry, write, _EVENTS)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split() == ["placed", "order-events-placed", "1", "registered"]
    assert registry.levels == {"order-events-placed": "BACKWARD", "order-events-paid": "BACKWARD"}
    result = _run(registry, write, _EVENTS, "--json")
    assert (result.exit_code, _statuses(result)) == (0, {"placed": "unchanged", "paid": "unchanged"})
    assert [len(each) for each in registry.subjects.values()] == [1, 1]


@pytest.mark.extended
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_an_incompatible_schema_stops_all(registry: FakeRegistry, write: Write, options: list[str]) -> None:
    """Guards against half a registration, and a failure that names neither what differs nor the version."""
    _run(registry, write, _EVENTS)
    result = _run(registry, write, _LATER, *options)
    assert result.exit_code == 1
    assert result.stderr == (
        "outbox: placed not compatible (BACKWARD) with version 1: payload.b: is required now\n"
    )
    assert [len(each) for each in registry.subjects.values()] == [1, 1]
    registry.levels["order-events-placed"] = "NONE"
    result = _run(registry, write, _LATER, *options, "--json")
    status = "compatible" if options else "registered"
    assert (result.exit_code, set(_statuses(result).values())) == (0, {status})


def test_avro_schemas_are_derived_and_registered(registry: FakeRegistry, write: Write) -> None:
    """Guards against a JSON Schema that is registered for a value in Avro, and half a registration."""
    events = _EVENTS.replace("{a: {}}", "{a: {type: string}}").replace(
        "schema: {type: object}", "schema: {type: X}"
    )
    result = _run(registry, write, events.replace("X", "object"), kind="avro")
    assert (result.exit_code, registry.subjects) == (1, {})
    assert "paid has no Avro schema: payload: an object with any members" in result.stderr
    events = events.replace("X", "string")
    assert _run(registry, write, events, kind="avro").exit_code == 0
    assert set(registry.kinds.values()) == {"AVRO"}
    assert registry.levels["order-events-placed"] == "BACKWARD"
    later = events.replace("[a], properties: {", "[a, b], properties: {b: {type: string}, ")
    result = _run(registry, write, later, "--check", kind="avro")
    assert result.exit_code == 1
    assert result.stderr.endswith("with version 1: payload.b: is required now, without a default\n")


def test_files_of_protobuf_are_registered_with_their_imports(registry: FakeRegistry, write: Write) -> None:
    """Guards against a schema that no client can read, for lack of what it imports."""
    events = _EVENTS.replace(
        "aggregate_type", "protobuf: {file: shop.binpb, message: shop.v1.First}, aggregate_type"
    )
    (write(events).parent / "shop.binpb").write_bytes(descriptor_set())
    for options, status in (["--check"], "new"), ([], "registered"), ([], "unchanged"):
        result = _run(registry, write, events, "--json", *options, kind="protobuf")
        assert (result.exit_code, _statuses(result)) == (0, {"placed": status, "paid": status})
        assert ("shop/common.proto" in registry.subjects) is (status != "new")
    assert {each: len(texts) for each, texts in registry.subjects.items()} == {
        **{"shop/common.proto": 1, "order-events-placed": 1, "order-events-paid": 1}
    }
    [text] = registry.subjects["order-events-placed"]
    reference = {"name": "shop/common.proto", "subject": "shop/common.proto", "version": 1}
    assert registry.references[text] == [reference]
    (write(events).parent / "shop.binpb").write_bytes(descriptor_set(more="by"))
    result = _run(registry, write, events, "--json", "--check", kind="protobuf")
    assert _statuses(result) == {"placed": "compatible", "paid": "compatible"}


def test_a_type_without_a_schema_stops_all(registry: FakeRegistry, write: Write) -> None:
    """Guards against a deployment after which the events of a type are dead letters."""
    result = _run(registry, write, _EVENTS.replace(", schema: {type: object}", ""))
    assert result.exit_code == 1
    assert "paid has no schema in the event catalog" in result.stderr
    assert not registry.subjects


def test_what_cannot_be_done_is_an_error(registry: FakeRegistry, write: Write) -> None:
    """Guards against an exit code that a pipeline takes for an incompatible schema."""
    registry.fails = 503, ""
    result = _run(registry, write, _EVENTS)
    assert (result.exit_code, "HTTP 503" in result.stderr) == (2, True)
    result = CliRunner().invoke(
        cli, ["catalog", "register"], env={"OUTBOX_CATALOG_FILE": str(write(_EVENTS)), "OUTBOX_FORMAT": ""}
    )
    assert (result.exit_code, "OUTBOX_FORMAT to json_schema, avro or protobuf" in result.stderr) == (2, True)


def test_earlier_versions_are_registered_first(registry: FakeRegistry, write: Write) -> None:
    """Guards against an older version that becomes the latest, and a check that promises too much."""
    first = "schema: {type: object, required: [a], properties: {a: {}}}"
    events = _EVENTS.replace(first, f"version: 2, versions: {{1: {first[8:]}}}, schema: {{type: object}}")
    result = _run(registry, write, events, "--check", "--json")
    assert _statuses(result) == {"placed@1": "new", "placed": "unchecked", "paid": "new"}
    result = _run(registry, write, events)
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["placed@1", "placed", "paid"]
    assert [_required(text) for text in registry.subjects["order-events-placed"]] == [["a"], []]
    result = _run(registry, write, events, "--json")
    assert (result.exit_code, set(_statuses(result).values())) == (0, {"unchanged"})
    later = (
        events.replace("version: 2", "version: 3")
        .replace("versions: {", "versions: {2: {type: object}, ")
        .replace("}, schema: {type: object}", "}, schema: {type: object, required: [b]}")
    )
    result = _run(registry, write, later, "--json", "--check")
    statuses = {
        "placed@1": "unchanged",
        "placed@2": "unchanged",
        "placed": "incompatible",
        "paid": "unchanged",
    }
    assert (result.exit_code, _statuses(result)) == (1, statuses)


def test_an_earlier_version_behind_a_newer_one(registry: FakeRegistry, write: Write) -> None:
    """Guards against an older schema that becomes the latest of its subject without a word."""
    assert _run(registry, write, _EVENTS).exit_code == 0
    first = "schema: {type: object, required: [a], properties: {a: {}}}"
    for required, status, exit_code in (("[a, b]", "incompatible", 1), ("[]", "registered", 0)):
        earlier = f"version: 2, versions: {{1: {{type: object, required: {required}}}}}, {first}"
        result = _run(registry, write, _EVENTS.replace(first, earlier), "--json")
        statuses = {"placed@1": status, "placed": "unchanged", "paid": "unchanged"}
        assert (result.exit_code, _statuses(result)) == (exit_code, statuses)
        [line] = result.stderr.splitlines()
        assert line.startswith("outbox: placed@1 ")
        assert "a newer version of the type is registered already: behind it, this one is the latest" in line


def _required(text: str) -> list[str]:
    found: list[str] = json.loads(text).get("required", [])
    return found
