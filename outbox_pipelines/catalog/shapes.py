"""Payload schemas reduced to what classes can say: the input of the class generator.

Invariants:
- A payload that fits its schema fits its shape; a shape may accept more, such as any text for a pattern.
- Each object with described members is one definition, of which the name is a class name chosen here.
- A shape has no text of the event catalog but names of members and values of an `enum`.
"""

from __future__ import annotations

import json
import keyword
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from outbox_pipelines.catalog.schemas import followed

Shape = dict[str, Any]
# Formats that Python has a type for, and of which the text is the same again.
_FORMATS: Final = frozenset({"date-time", "date", "uuid", "decimal"})
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KEPT: Final[dict[str, tuple[str, ...]]] = {
    "string": ("minLength", "maxLength"),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": ("minItems", "maxItems"),
}
# They say more about an object than its members do.
_MORE: Final = frozenset(
    {"anyOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas", "unevaluatedProperties"}
)
_CHOICES: Final = ("anyOf", "oneOf")
_ANYTHING: Final[Shape] = {}
_NULL: Final[Shape] = {"type": "null"}
_DEEPEST: Final = 30
# What the module of classes itself defines or imports.
_TAKEN: Final = frozenset(
    {
        *("Any", "Annotated", "AwareDatetime", "BaseModel", "ClassVar", "ConfigDict", "Decimal", "Field"),
        *("Literal", "Payload", "RootModel", "SerializationInfo", "SerializerFunctionWrapHandler", "Union"),
        *("UUID", "Date", "Model"),
    }
)


def class_names(texts: Iterable[str]) -> dict[str, str]:
    """Return a class name for each text; of texts that would share one, with the codes of their signs.

    So a name does not depend on the order of the texts.
    """
    texts = list(texts)
    plain = {text: _class_name(text) for text in texts}
    counts: dict[str, int] = {}
    for name in plain.values():
        counts[name] = counts.get(name, 0) + 1
    return {
        text: name if counts[name] == 1 else _class_name(text, spelled=True) for text, name in plain.items()
    }


def _class_name(text: str, *, spelled: bool = False) -> str:
    """Return `order.placed` as `OrderPlaced`, with `@1` as `OrderPlacedV1`; spelled, as `Order2ePlaced`."""
    if not spelled:
        text = re.sub(r"@(\d+)$", r".v\1", text)
    words = re.split(r"([^\W_]+)", unicodedata.normalize("NFKC", text))
    is_spelled = spelled or len(words) == 1
    # What is between two words is at the even places.
    name = "".join(
        f"{word[:1].upper()}{word[1:]}"
        if at % 2
        else "".join(f"{ord(sign):x}" for sign in word if is_spelled)
        for at, word in enumerate(words)
    )
    name = unicodedata.normalize("NFKC", name)
    if not name.isidentifier():
        name = "Event" + "".join(sign for sign in name if f"a{sign}".isidentifier())
    return f"{name}Event" if keyword.iskeyword(name) or name in _TAKEN or name == "Event" else name


@dataclass
class Shapes:
    """The definitions of all classes of a module."""

    taken: set[str]
    """Names of classes."""
    definitions: dict[str, Shape] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By class, the schema it is made of; of objects, with all members."""

    def add(self, name: str, schema: dict[str, Any] | None) -> None:
        """Define the class of a payload, and those of the objects in it."""
        made = _OfType(self, name, schema or {})
        root = made.merged(schema or {}, 0)
        if _is_object(root) and _types(root) in ([], ["object"]):
            made.define(name, root, 0, "#")
        else:
            # Before the name of its own is found: an object that contains itself has another one.
            self.described[name] = root
            self.definitions[name] = made.shape(schema or {}, name, 0)

    def free(self, name: str) -> str:
        """Return the name of a new class, with a number if there is one of that name."""
        found, number = name, 1
        while found in self.taken:
            number += 1
            found = f"{name}{number}"
        self.taken.add(found)
        return found


class _OfType:
    """The shapes of one event type."""

    def __init__(self, shapes: Shapes, name: str, root: dict[str, Any]) -> None:
        self._shapes = shapes
        self._name = name
        self._root = root
        self._named: dict[str, Shape] = {}
        """By reference, also of those that are being made."""

    def define(self, name: str, node: dict[str, Any], depth: int, reference: str = "") -> None:
        """Define the class of an object; a reference to it is that class."""
        if reference:
            self._named[json.dumps({"$ref": reference})] = {"$ref": f"#/$defs/{name}"}
        members, required = dict(node.get("properties", {})), list(node.get("required", ()))
        members |= {key: {} for key in required if key not in members}
        others = node.get("additionalProperties")
        shape: Shape = {"type": "object", "required": required}
        if others is False and "patternProperties" not in node:
            shape["additionalProperties"] = False
        elif others is not None or not _MORE.isdisjoint(node):
            shape["additionalProperties"] = True
        self._shapes.described[name] = {**node, "properties": members}
        # Its place is before those of its members.
        self._shapes.definitions[name] = shape
        shape["properties"] = {
            key: self.shape(each, f"{name}{_class_name(key)}", depth + 1) for key, each in members.items()
        }

    def merged(self, node: Any, depth: int) -> dict[str, Any]:
        """Return a schema with what it refers to, and what its `allOf` has."""
        node = followed(self._root, node)
        if not isinstance(node, dict) or depth > _DEEPEST or "$ref" in node:
            return {}
        parts = [self.merged(each, depth + 1) for each in node.get("allOf", ())]
        found = {key: each for key, each in node.items() if key != "allOf"}
        for part in parts:
            for key, each in part.items():
                if key == "properties":
                    found[key] = _both(found.get(key, {}), each)
                elif key == "required":
                    found[key] = [*dict.fromkeys([*found.get(key, ()), *each])]
                else:
                    found.setdefault(key, each)
        return found

    def shape(self, node: Any, name: str, depth: int) -> Shape:
        """Return the shape of a schema; `name` is that of a class which it may need."""
        if not isinstance(node, dict) or depth > _DEEPEST:
            return _ANYTHING
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return self._shape(self.merged(node, 0), name, depth)
        key = json.dumps(node, sort_keys=True)
        if key not in self._named:
            # A reference within itself that leads to no object.
            self._named[key] = _ANYTHING
            name = f"{self._name}{_class_name(reference.rpartition('/')[2])}"
            self._named[key] = self._shape(self.merged(node, 0), name, depth, key)
        return self._named[key]

    def _shape(self, node: dict[str, Any], name: str, depth: int, key: str | None = None) -> Shape:
        if values := _values(node):
            return _choice([{"enum": [each]} if each is not None else _NULL for each in values])
        types = _types(node)
        if _is_object(node):
            name = self._shapes.free(name)
            found: Shape = {"$ref": f"#/$defs/{name}"}
            others = [self._of_type(each, node, name, depth) for each in types if each != "object"]
            if key is not None:
                self._named[key] = _choice([found, *others])
            self.define(name, node, depth)
            return _choice([found, *others])
        for keyword_ in _CHOICES:
            if keyword_ in node:
                # What stands beside a choice holds for each of it.
                beside: dict[str, Any] = {each: node[each] for each in ("type", "items") if each in node}
                return _choice([self._branch(each, beside, name, depth) for each in node[keyword_]])
        return _choice([self._of_type(each, node, name, depth) for each in types] or [_ANYTHING])

    def _branch(self, node: Any, beside: dict[str, Any], name: str, depth: int) -> Shape:
        if isinstance(node, dict) and beside and not {"type", "$ref", "enum", "const"} & node.keys():
            node = beside | node
        return self.shape(node, name, depth + 1)

    def _of_type(self, kind: str, node: dict[str, Any], name: str, depth: int) -> Shape:
        found: Shape = {"type": kind, **{key: node[key] for key in _KEPT.get(kind, ()) if key in node}}
        if kind == "string" and node.get("format") in _FORMATS:
            return {"type": kind, "format": node["format"]}
        if kind == "array":
            items = node.get("items", True) if "prefixItems" not in node else True
            found["items"] = _loose(self.shape(items, f"{name}Item", depth + 1))
        if kind == "object":
            others = node.get("additionalProperties", True) if _MORE.isdisjoint(node) else True
            found["additionalProperties"] = _loose(self.shape(others, f"{name}Value", depth + 1)) or True
        return found


def admits_null(shape: Shape) -> bool:
    """Return whether null is a value of a shape."""
    return shape in (_ANYTHING, _NULL) or any(admits_null(each) for each in shape.get("anyOf", ()))


def _is_object(node: dict[str, Any]) -> bool:
    """Return whether a schema describes members."""
    return bool(node.get("properties")) and "object" in (_types(node) or ["object"])


def _types(node: dict[str, Any]) -> list[str]:
    given = node.get("type", [])
    return [given] if isinstance(given, str) else list(given)


def _values(node: dict[str, Any]) -> list[Any] | None:
    """Return the values that a schema allows; None where Python's `Literal` cannot say it."""
    values = [node["const"]] if "const" in node else list(node.get("enum", ()))
    kinds = {type(each) for each in values} - {type(None)}
    # 1 and true are equal in Python.
    is_plain = kinds <= {str, int} or kinds <= {str, bool}
    return [*dict.fromkeys(values)] if values and is_plain else None


def _choice(shapes: list[Shape]) -> Shape:
    """Return the shape of a value that fits one of these."""
    choices: list[Shape] = []
    for shape in _flat(shapes):
        if shape == _ANYTHING:
            return _ANYTHING
        if shape not in choices:
            choices.append(shape)
    values = [shape["enum"][0] for shape in choices if "enum" in shape]
    choices = [*([{"enum": values}] if values else []), *(shape for shape in choices if "enum" not in shape)]
    return choices[0] if len(choices) == 1 else {"anyOf": [_loose(shape) for shape in choices]}


def _flat(shapes: list[Shape]) -> Iterator[Shape]:
    for each in shapes:
        if "anyOf" in each:
            yield from _flat(each["anyOf"])
        elif len(each.get("enum", ())) > 1:
            yield from ({"enum": [value]} for value in each["enum"])
        else:
            yield each


def _loose(shape: Shape) -> Shape:
    """Return a shape without limits: within another one, the generator would make a class of it."""
    limits = {key for keys in _KEPT.values() for key in keys}
    return {key: each for key, each in shape.items() if key not in limits}


def _both(some: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {"allOf": [some[key], others[key]]}
        if key in some and key in others and some[key] != others[key]
        else some.get(key, others.get(key))
        for key in [*some, *(each for each in others if each not in some)]
    }
