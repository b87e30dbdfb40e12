"""The Avro schema of a payload, derived from its JSON Schema by a rule for each type.

Invariants:
- What Avro cannot describe is refused with its place; what only limits values (`pattern`, `minimum`) is left
  to who validates.
- The result depends on what the JSON Schema says, not on the order of its members: fields are sorted.
- Names stay the same as long as the places, or the `$defs`, that they come from do.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, Final

from outbox_pipelines.catalog.schemas import resolved
from outbox_pipelines.formats.avro.avro_schema import NO_SCHEMA, NULL, PRECISION, is_empty, parsed

# They describe parts of a payload in a way that no type of Avro has.
_UNKNOWN: Final = (
    *("$dynamicRef", "$recursiveRef", "additionalItems", "allOf", "dependentSchemas", "if"),
    *("patternProperties", "prefixItems", "then", "unevaluatedItems"),
)
_WORDS: Final = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
# In the order of a union.
_TYPES: Final = ("boolean", "integer", "number", "string", "array", "object")
_OF_VALUES: Final = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): NULL}
# They cannot be the name of a record.
_PRIMITIVE: Final = frozenset({NULL, "boolean", "int", "long", "float", "double", "bytes", "string"})
_MOST_REFERENCES: Final = 20


class NoEquivalentError(ValueError):
    """A part of a JSON Schema that Avro cannot describe, by its place in the payload."""


def document(event_type: str, schema: dict[str, Any]) -> str:
    """Return the Avro schema of an event type's payload, as JSON.

    Raises:
        NoEquivalentError: it has none.
    """
    name = ".".join(map(_named, event_type.split(".")))
    if name in _PRIMITIVE:
        name += "_"
    try:
        found = _Derived(schema, name).type_of(schema, name, "payload")
    except RecursionError:
        raise NoEquivalentError("payload: an array or a map of itself: put an object in between") from None
    return json.dumps(found, sort_keys=True, ensure_ascii=False)


class _Derived:
    """The types of one payload."""

    def __init__(self, root: dict[str, Any], name: str) -> None:
        self._root = root
        self._name = name
        self._sources: dict[str, tuple[str, Any]] = {}
        """By name of a type: the kind and the JSON Schema that it comes from."""

    def type_of(self, schema: Any, name: str, place: str) -> Any:
        """Return the type of the values that a JSON Schema describes.

        Args:
            name: of the type, if it is one that has a name.
        """
        schema, name = self._followed(schema, name, place)
        if not isinstance(schema, dict):
            raise NoEquivalentError(f"{place}: {'any' if schema else 'no'} value: name a type")
        for keyword in _UNKNOWN:
            if keyword in schema:
                raise NoEquivalentError(f"{place}: {keyword} has no equivalent: describe the type without it")
        found = [each for kind in _kinds(schema, place) for each in self._of(kind, schema, name, place)]
        if len(found) != len({_kind(each) for each in found}):
            raise NoEquivalentError(
                f"{place}: several types that a value in JSON does not tell apart: describe one of them"
            )
        return found[0] if len(found) == 1 else sorted(found, key=lambda each: each != NULL)

    def _followed(self, schema: Any, name: str, place: str) -> tuple[Any, str]:
        """Return the schema that references lead to, and the name of a type that is used by reference."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                return schema, name
            target = resolved(self._root, reference)
            beside = {key: each for key, each in schema.items() if key not in ("$ref", *_WORDS)}
            if beside:
                schema = {**target, **beside} if isinstance(target, dict) else target
            else:
                part = reference.rpartition("/")[2]
                schema, name = target, self._name if part == "#" else f"{self._name}_{_named(part)}"
        raise NoEquivalentError(f"{place}: a reference that leads to itself")

    def _of(self, kind: str, schema: dict[str, Any], name: str, place: str) -> list[Any]:
        """Return the types of the values of one type of JSON; several of `anyOf`."""
        if kind in ("anyOf", "oneOf"):
            found: list[Any] = []
            for each in schema[kind]:
                part = self.type_of(each, name, place)
                found += [one for one in (part if isinstance(part, list) else [part]) if one not in found]
            return found
        if kind == "array":
            if "items" not in schema or isinstance(schema["items"], list):
                raise NoEquivalentError(f"{place}: an array of any values: describe them with items")
            items = self.type_of(schema["items"], name, f"{place}[]")
            if is_empty(items):
                raise NoEquivalentError(f"{place}[]: items that are all alike: give the number of them")
            return [{"type": "array", "items": items}]
        if kind == "object":
            return [self._object(schema, name, place)]
        if kind == "string":
            return [self._string(schema, name, place)]
        if kind == "number":
            decimal = _decimal(schema, place)
            return [{**decimal, "json_type": "number"} if decimal else "double"]
        return ["long" if kind == "integer" else kind]

    def _string(self, schema: dict[str, Any], name: str, place: str) -> Any:
        symbols = [each for each in _values(schema) or () if isinstance(each, str)]
        if symbols:
            if not all(map(_NAME, symbols)):
                return "string"
            return self._define({"type": "enum", "symbols": [*dict.fromkeys(symbols)]}, schema, name, place)
        match schema.get("format"):
            case "date-time":
                return {"type": "long", "logicalType": "timestamp-micros"}
            case "date":
                return {"type": "int", "logicalType": "date"}
            case "uuid":
                return {"type": "string", "logicalType": "uuid"}
            case "decimal":
                return _decimal(schema, place) or "string"
        return "string"

    def _object(self, schema: dict[str, Any], name: str, place: str) -> Any:
        members = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        is_map = isinstance(others, dict) and bool(others)
        if is_map and not members:
            return {"type": "map", "values": self.type_of(others, name, f"{place}.*")}
        if is_map:
            raise NoEquivalentError(f"{place}: additionalProperties beside properties: describe one of them")
        if not members and others is not False:
            raise NoEquivalentError(
                f"{place}: an object with any members: describe them with properties, or all their values "
                "with additionalProperties"
            )
        required = set(schema.get("required", ()))
        if missing := required - {*members}:
            raise NoEquivalentError(f"{place}.{min(missing)}: is required and has no type: describe it")
        record: dict[str, Any] = {"type": "record"}
        found = self._define(record, schema, name, place)
        if found is record:
            record["fields"] = [
                self._field(key, members[key], f"{name}_{_named(key)}", f"{place}.{key}", key in required)
                for key in sorted(members)
                # Such a member never exists.
                if members[key] is not False
            ]
            _require_names(record["fields"], place)
        return found

    def _field(self, key: str, schema: Any, name: str, place: str, is_required: bool) -> dict[str, Any]:
        kind = self.type_of(schema, name, place)
        found: dict[str, Any] = {"name": _named(key)}
        if found["name"] != key:
            found["json_name"] = key
        if isinstance(schema, dict) and isinstance(schema.get("description"), str):
            found["doc"] = schema["description"]
        if not is_required:
            others = [each for each in (kind if isinstance(kind, list) else [kind]) if each != NULL]
            return {**found, "type": [NULL, *others], "default": None}
        if isinstance(schema, dict) and "default" in schema and _is_default(schema["default"], kind):
            found["default"] = schema["default"]
        return {**found, "type": kind}

    def _define(self, new: dict[str, Any], schema: dict[str, Any], name: str, place: str) -> Any:
        """Return the new type with its name; of one that is there already, its name alone."""
        source = new["type"], {key: each for key, each in schema.items() if key not in _WORDS}
        if name in self._sources:
            if self._sources[name] != source:
                raise NoEquivalentError(
                    f"{place}: its name in Avro, {name}, is another type's: put one of them under $defs, and "
                    "refer to it"
                )
            return name
        self._sources[name] = source
        new["name"] = name
        if isinstance(schema.get("description"), str):
            new["doc"] = schema["description"]
        return new


def _kinds(schema: dict[str, Any], place: str) -> list[str]:
    """Return the types of JSON that the values have; or the keyword with alternatives."""
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            if {"type", "enum", "const", "properties", "items", "anyOf"} & schema.keys() - {keyword}:
                raise NoEquivalentError(f"{place}: {keyword} beside a type: describe the type in it")
            return [keyword]
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given or ())
    if (values := _values(schema)) is not None:
        of_values = {_OF_VALUES.get(type(each), "") for each in values}
        if "" in of_values:
            raise NoEquivalentError(f"{place}: an enum of objects or arrays: describe their type")
        # 1 is a number, too.
        kinds = {
            each
            for each in of_values
            if not kinds or each in kinds or (each == "integer" and "number" in kinds)
        }
    elif not kinds:
        kinds = {name for key, name in (("properties", "object"), ("items", "array")) if key in schema}
    if not kinds:
        raise NoEquivalentError(f"{place}: any value: name a type")
    if "number" in kinds:
        kinds.discard("integer")
    return [NULL] * (NULL in kinds) + [each for each in _TYPES if each in kinds]


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _decimal(schema: dict[str, Any], place: str) -> dict[str, Any] | None:
    """Return a decimal with as many decimals as `multipleOf` has; None without it."""
    step = schema.get("multipleOf")
    if not isinstance(step, int | float):
        return None
    exponent = Decimal(repr(step)).normalize().as_tuple().exponent
    scale = max(0, -int(exponent))
    if scale > PRECISION:
        raise NoEquivalentError(f"{place}: multipleOf has more than {PRECISION} decimals")
    return {"type": "bytes", "logicalType": "decimal", "precision": PRECISION, "scale": scale}


def _kind(schema: Any) -> str:
    """Return which values of JSON a type takes."""
    if isinstance(schema, str):
        return {"long": "number", "double": "number"}.get(schema, schema)
    if "json_type" in schema:
        return "number"
    if "logicalType" in schema or schema["type"] == "enum":
        return "string"
    return "array" if schema["type"] == "array" else "object"


def _is_default(value: Any, kind: Any) -> bool:
    """Whether Avro takes this value as a field's default in the same form as JSON."""
    if isinstance(kind, list):
        # That of the first type of a union.
        return value is None and kind[0] == NULL
    if isinstance(kind, dict):
        if kind["type"] == "enum":
            return value in kind["symbols"]
        return (kind["type"], value) in (("array", []), ("map", {}))
    of_value = _OF_VALUES.get(type(value))
    wanted = {"long": "integer", "double": "number"}.get(kind, kind)
    return of_value == wanted or (of_value == "integer" and wanted == "number")


def _named(text: str) -> str:
    """Return the text as a name in Avro: other characters, and a digit that comes first, by their number."""
    name = re.sub("[^A-Za-z0-9_]", lambda found: f"_{ord(found[0]):x}_", text)
    return name if _NAME(name) else f"_{name}"


def _require_names(fields: list[dict[str, Any]], place: str) -> None:
    names: dict[str, str] = {}
    for each in fields:
        key = each.get("json_name", each["name"])
        if (other := names.setdefault(each["name"], key)) != key:
            raise NoEquivalentError(f"{place}: {other} and {key} have the same name in Avro: rename one")


def differences(old: str, new: str) -> list[str]:
    """Return what of a new schema cannot read an old one's payloads, or is described in another way."""
    try:
        before, after = map(parsed, (old, new))
    except NO_SCHEMA:
        return ["that version is no Avro schema that can be read alone"]
    return _differences("payload", before, after)


def _differences(place: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old["type"] == new["type"]:
        kind = new["type"]
        if kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            return _differences(f"{place}[]", old[inner], new[inner])
        if kind == "enum":
            return [
                f"{place}: {symbol} is no value any more"
                for symbol in old["symbols"]
                if symbol not in new["symbols"]
            ]
        if kind == "record" and old["name"] == new["name"]:
            before = {field["name"]: field for field in old["fields"]}
            differences = []
            for field in new["fields"]:
                within = f"{place}.{field.get('json_name', field['name'])}"
                if field["name"] in before:
                    differences += _differences(within, before[field["name"]]["type"], field["type"])
                elif "default" not in field:
                    differences.append(f"{within}: is required now, without a default")
            return differences
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            difference for pair in zip(old, new, strict=True) for difference in _differences(place, *pair)
        ]
    return [] if old == new else [f"{place}: {_in_short(old)} → {_in_short(new)}"]


def _in_short(schema: Any) -> str:
    if isinstance(schema, list):
        return " or ".join(map(_in_short, schema))
    if isinstance(schema, dict):
        return str(schema.get("logicalType") or schema.get("name") or schema["type"])
    return str(schema)
