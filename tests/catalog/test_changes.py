"""`outbox catalog diff`: what a new version of the event catalog breaks, and for whom."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from outbox_pipelines.catalog.changes import Whom, changes
from outbox_pipelines.catalog.document import Catalog
from outbox_pipelines.cli.main import cli

BOTH: frozenset[Whom] = frozenset({"consumers", "writers"})
LINE = {"type": "object", "properties": {"sku": {"type": "string"}}}


def _catalog(schema: Any = None, **entries: Any) -> Catalog:
    documented = {"description": "d", "producer": "shop", "owner": "o", "consumers": ["billing"], **entries}
    schemas = {} if schema is None else {"schema": schema}
    return Catalog.model_validate({"events": {"a": {**documented, **schemas}}})


def _breaks(old: Any, new: Any) -> dict[str, set[str]]:
    return {each.what: set(each.breaks) for each in changes(_catalog(old), _catalog(new))}


NO: Any = object()
B: dict[str, Any] = {"properties": {"b": {}}, "additionalProperties": False}
LINES = {"$defs": {"line": LINE}, "items": {"$ref": "#/$defs/line"}}


@pytest.mark.parametrize(
    ("old", "new", "narrows", "widens"),
    [
        ({"type": "integer"}, {"type": "number"}, NO, 1.5),
        ({"type": "string"}, {"type": ["string", "null"]}, NO, None),
        ({"enum": ["a"]}, {"enum": ["a", "b"]}, NO, "b"),
        ({"enum": ["a", "b"]}, {"const": "b"}, "a", NO),
        ({}, {"enum": [1]}, 2, NO),
        ({"minimum": 1}, {"minimum": 2}, 1, NO),
        ({"minimum": 1}, {}, NO, 0),
        ({"maximum": 9}, {"maximum": 5}, 7, NO),
        ({}, {"maxLength": 2}, "abc", NO),
        ({"exclusiveMaximum": 3}, {"exclusiveMaximum": 4}, NO, 3),
        ({"type": "object"}, {"type": "object", "required": ["b"]}, {}, NO),
        ({"required": ["b"]}, {}, NO, {}),
        ({"properties": {"b": {"const": 1}}}, {"properties": {"b": {"const": 2}}}, {"b": 1}, {"b": 2}),
        (B | {"properties": {}}, B, NO, {"b": 1}),
        (B, B | {"properties": {}}, {"b": 1}, NO),
        ({"additionalProperties": {"type": "string"}}, {"additionalProperties": True}, NO, {"b": 1}),
        ({"items": {"type": "string"}}, {"items": {"type": "number"}}, ["x"], [1]),
        ({"items": True}, {"items": False}, [1], NO),
        ({}, {"pattern": "^a"}, "b", NO),
        ({"multipleOf": 2}, {}, NO, 3),
        (LINES, {"items": {**LINE, "required": ["sku"]}}, [{}], NO),
    ],
)
def test_who_is_broken_is_who_gets_what_does_not_fit(old: Any, new: Any, narrows: Any, widens: Any) -> None:
    """Guards against a rule that is the wrong way round: a payload shows each of them."""
    fits_old, fits_new = (Draft202012Validator(each).is_valid for each in (old, new))
    for payload, fits, fits_not in ((narrows, fits_old, fits_new), (widens, fits_new, fits_old)):
        assert payload is NO or (fits(payload), fits_not(payload)) == (True, False)
    found: set[str] = set().union(*_breaks(old, new).values())
    assert found == {whom for whom, each in (("writers", narrows), ("consumers", widens)) if each is not NO}


def _schema(random: Random, depth: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if random.random() < 0.5:
        found["type"] = random.sample(["object", "array", "string", "integer", "number", "null"], 3)
    for keyword in random.sample(["minimum", "maximum", "minLength", "maxItems", "minProperties"], 1):
        found[keyword] = random.randint(0, 2)
    if random.random() < 0.3:
        found["enum"] = random.sample([0, 1, 2, "", "a", None, [], {}, [1], {"a": 1}], 6)
    if depth and random.random() < 0.6:
        found["properties"] = {name: _schema(random, depth - 1) for name in "ab"}
        found["required"] = random.sample("ab", random.randint(0, 2))
        found["additionalProperties"] = random.choice([True, False, _schema(random, 0)])
    if depth and random.random() < 0.3:
        found["items"] = _schema(random, depth - 1)
    return found


def _payload(random: Random, depth: int = 2) -> Any:
    if depth and random.random() < 0.7:
        if random.random() < 0.3:
            return [_payload(random, depth - 1) for _ in range(random.randint(0, 2))]
        return {name: _payload(random, depth - 1) for name in random.sample("abc", random.randint(0, 3))}
    return random.choice([0, 1, 2, 3, 1.5, "", "a", "ab", None, True])


def test_no_payload_contradicts_it() -> None:
    """Guards against a change that breaks someone and is called harmless: of schemas drawn at random."""
    random, shown = Random(7), {"writers": 0, "consumers": 0}
    for _ in range(150):
        old, new = _schema(random), _schema(random)
        found: set[str] = set().union(*_breaks(old, new).values())
        fits = [Draft202012Validator(each).is_valid for each in (old, new)]
        for _ in range(30):
            payload = _payload(random)
            before, after = (each(payload) for each in fits)
            # Members that one of the two does not describe are taken for absent.
            if before != after and _described(payload, old, new):
                whom = "writers" if before else "consumers"
                assert whom in found, (old, new, payload)
                shown[whom] += 1
    assert min(shown.values()) > 100


def _described(payload: Any, *schemas: dict[str, Any]) -> bool:
    if isinstance(payload, list):
        items = [each.get("items", {}) for each in schemas]
        return all(_described(each, *items) for each in payload)
    if not isinstance(payload, dict):
        return True
    members = [each.get("properties", {}) for each in schemas]
    return len({*map(frozenset, members)}) == 1 and all(
        _described(value, *(each[name] for each in members))
        for name, value in payload.items()
        if name in members[0]
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"properties": {"b": {"type": "string"}}}, {"properties": {"b": {"type": "string"}, "c": {}}}),
        ({"properties": {"b": {"type": "string"}}}, {}),
        ({"title": "x", "type": "object"}, {"description": "y", "type": "object"}),
        ({"type": "string"}, {"type": ["string"]}),
        ({"enum": ["a"]}, {"const": "a"}),
        ({}, {"items": True, "additionalProperties": True}),
    ],
)
def test_what_breaks_no_one(old: Any, new: Any) -> None:
    """Guards against a check in CI that people learn to ignore."""
    assert not any(_breaks(old, new).values())


@pytest.mark.parametrize("keyword", ["anyOf", "not", "patternProperties", "if", "prefixItems"])
def test_what_cannot_be_compared_is_asked_about(keyword: str) -> None:
    """Guards against a change in a part of a schema that is passed over."""
    value: Any = {"x": {"type": "string"}} if keyword == "patternProperties" else {"type": "string"}
    if keyword in ("anyOf", "prefixItems"):
        value = [value]
    assert _breaks({}, {keyword: value}) == {f"payload: {keyword} is different": BOTH}
    assert _breaks({keyword: value}, {keyword: value}) == {}


def test_another_message_of_protobuf_is_named() -> None:
    """Guards against a change that is not shown, although what is compared here is JSON alone."""
    old, new = (_catalog(protobuf={"file": file, "message": "m"}) for file in (b"1", b"2"))
    assert [each.what for each in changes(old, new)] == [
        "protobuf: `outbox catalog register --check` compares it"
    ]
    assert changes(old, old) == []


def test_a_schema_that_contains_itself() -> None:
    """Guards against a comparison without end."""
    tree = {"$defs": {"t": {"properties": {"left": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    changed = json.loads(json.dumps(tree).replace('"left"', '"right"'))
    assert _breaks(tree, tree) == {}
    assert set(_breaks(tree, changed)) == {"payload.right: added", "payload.left: removed"}


def test_types_and_topics() -> None:
    """Guards against a type that disappears, or moves, without a word to who reads it."""
    both = Catalog(events={**_catalog().events, "b": _catalog().events["a"]})
    (removed,) = changes(both, _catalog())
    assert (removed.event_type, removed.what, removed.breaks) == ("b", "removed", BOTH)
    assert removed.whom == ("shop", "billing")
    (added,) = changes(_catalog(), both)
    assert (added.event_type, added.what, added.breaks) == ("b", "added", frozenset())
    found = {
        each.what: (set(each.breaks), each.whom)
        for each in changes(_catalog(topic="x"), _catalog(topic="y", lifecycle="retired"))
    }
    assert found == {
        "lifecycle: active → retired": (BOTH, ("shop", "billing")),
        "topic: x → y": ({"consumers"}, ("billing",)),
    }
    numbered = changes(_catalog(version=1), _catalog(version=2))
    assert [(each.what, each.breaks) for each in numbered] == [("version: 1 → 2", frozenset())]
    announced = changes(_catalog(lifecycle="deprecated"), _catalog(lifecycle="retired"))
    assert [set(each.breaks) for each in announced] == [set()]
    gone = Catalog(events={**_catalog().events, "b": _catalog(lifecycle="retired").events["a"]})
    assert [each.breaks for each in changes(gone, _catalog())] == [set()]


FILE = """
events:
  order.placed:
    description: d
    producer: shop
    owner: o
    consumers: [billing]
    schema: {type: object, required: [total], properties: {total: {type: integer, minimum: %s}}}
"""


def test_the_command(tmp_path: Path) -> None:
    """Guards against a step in CI that passes whatever changes."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(FILE % 1)
    new.write_text(FILE % 2)
    done = CliRunner().invoke(cli, ["catalog", "diff", str(old), str(new)])
    assert (done.exit_code, done.output.splitlines()) == (
        1,
        [
            "event type    change                         breaks",
            "order.placed  payload.total: minimum: 1 → 2  writers (shop)",
        ],
    )
    done = CliRunner().invoke(cli, ["catalog", "diff", "--json", str(new), str(old)])
    assert (done.exit_code, json.loads(done.output)) == (
        1,
        [
            {
                "event_type": "order.placed",
                "change": "payload.total: minimum: 2 → 1",
                "breaks": ["consumers"],
                "whom": ["billing"],
            }
        ],
    )
    done = CliRunner().invoke(cli, ["catalog", "diff", str(old), str(old)])
    assert (done.exit_code, done.output) == (0, "no difference\n")
    done = CliRunner().invoke(cli, ["catalog", "diff", str(old), str(tmp_path / "away.yaml")])
    assert done.exit_code == 2
    assert "away.yaml: cannot be read" in done.output


def test_an_earlier_version_that_is_kept_breaks_no_writer() -> None:
    """Guards against a version that cannot be changed for lack of a list, and a list that changes unseen."""
    old = _catalog({"minimum": 1}, version=1)

    def found(schema: Any, old: Catalog = old, **entries: Any) -> dict[str, set[str]]:
        return {each.what: set(each.breaks) for each in changes(old, _catalog(schema, **entries))}

    new = {"minimum": 2}
    assert found(new, version=1) == {"payload: minimum: 1 → 2": {"writers"}}
    assert found(new, version=2) == {"version: 1 → 2": set(), "payload: minimum: 1 → 2": {"writers"}}
    # As `outbox catalog schemas` writes it.
    kept: dict[str, Any] = {"version": 2, "versions": {"1": {"minimum": 1, "title": "a"}}}
    assert found(new, **kept) == {"version: 1 → 2": set(), "payload: minimum: 1 → 2": set()}
    assert found({"minimum": 0}, **kept)["payload: minimum: 1 → 0"] == {"consumers"}
    changed = found(new, **kept | {"versions": {"1": new}})
    assert changed["version 1: payload: minimum: 1 → 2"] == {"writers"}
    assert changed["payload: minimum: 1 → 2"] == {"writers"}
    second = _catalog(new, **kept)
    assert found(new, second, version=2) == {"version 1: removed": {"writers"}}
    assert found(new, second, version=3, versions={"2": new}) == {
        **{"version: 2 → 3": set(), "version 1: removed": {"writers"}}
    }
    more = {"versions": {"1": {"minimum": 1}, "2": new}}
    assert found(new, second, version=4, **more | {"versions": {**more["versions"], "3": {}}}) == {
        **{"version: 2 → 4": set(), "version 3: added": set()}
    }
    assert found(new, _catalog(new), **kept) == {"version: None → 2": set(), "version 1: added": set()}
