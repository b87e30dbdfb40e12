"""JSON Schemas: validate them, check payloads against them, and list the fields that they describe.

Invariants:
- A member that is encrypted with the key of a data subject is a text: only a member that may be any text fits
  its schema before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jsonschema import Draft202012Validator, FormatChecker, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

# An empty registry: the default one would fetch referenced schemas from the network.
_NOTHING_ELSE: Final[Registry[Any]] = Registry()
_DEEPEST: Final = 5


def checker(schema: Mapping[str, Any]) -> Validator:
    """Return a validator of payloads for the schema's draft (default: 2020-12), including formats."""
    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, registry=_NOTHING_ELSE, format_checker=FormatChecker())


def check_schema(schema: dict[str, Any]) -> None:
    """Raise `ValueError` if this is not a valid JSON Schema."""
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"{place(error.absolute_path)} is not a JSON Schema: {error.message}") from None
    for reference in _references(schema):
        try:
            resolved(schema, reference)
        except Unresolvable:
            raise ValueError(
                f"refers to {reference}, which is not in the schema: put it under $defs, and use #/$defs/…"
            ) from None


def place(path: Any, root: str = "it") -> str:
    """Return a place in a document, such as ``lines[0].price``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return f"{root}{text}" if text.startswith("[") or root != "it" else text.lstrip(".") or root


@dataclass(frozen=True, slots=True)
class FieldOf:
    """A member of a payload."""

    name: str
    """The full path: ``lines[].price``."""
    kind: str
    required: bool
    description: str


def fields(schema: dict[str, Any]) -> list[FieldOf]:
    """Return the members that a schema describes, including nested ones, in its order."""
    return list(_fields(schema, schema, "", 0))


def _fields(root: dict[str, Any], schema: Any, around: str, depth: int) -> Iterator[FieldOf]:
    schema = followed(root, schema)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return
    if isinstance(schema.get("items"), dict):
        yield from _fields(root, schema["items"], f"{around}[]", depth + 1)
    for name, found in (schema.get("properties") or {}).items():
        member = followed(root, found)
        if not isinstance(member, dict):
            member = {}
        full = f"{around}.{name}" if around else name
        is_required = name in schema.get("required", ())
        yield FieldOf(full, _kind(member), is_required, str(member.get("description", "")))
        yield from _fields(root, member, full, depth + 1)


def followed(root: dict[str, Any], schema: Any) -> Any:
    """Return the schema that a reference points to, merged with the reference's sibling members."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        beside = {name: value for name, value in schema.items() if name != "$ref"}
        found = resolved(root, schema["$ref"])
        schema = found | beside if isinstance(found, dict) else found
    return schema


def _kind(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if "enum" in schema:
        return ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    kind = schema.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{text}, {schema['format']}" if "format" in schema else text


def resolved(root: dict[str, Any], reference: str) -> Any:
    """Return what a reference within a schema points to."""
    resource = DRAFT202012.create_resource(root)
    registry: Registry[Any] = _NOTHING_ELSE.with_resource("", resource)
    return registry.resolver().lookup(reference).contents


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


AGGREGATE_ID: Final = "aggregate_id"
_ITEMS: Final = "[]"
_KINDS: Final = ("string", ["string", "null"], ["null", "string"])
# What a text can have beside its type, and an encrypted one fits.
_WORDS: Final = frozenset(
    {
        *("type", "title", "description", "$comment", "examples", "default", "deprecated"),
        *("readOnly", "writeOnly", "minLength"),
    }
)


def check(protected: Mapping[str, str], schema: dict[str, Any] | None) -> None:
    """Raise `ValueError` unless each path is that of a plain text, and has its subject in the payload."""
    for path, subject in protected.items():
        found = _member(schema or {}, path)
        if found is None:
            raise ValueError(
                f"protected {path} is not in its schema: correct the path, or describe the member"
            )
        kind, more = found.get("type"), sorted(found.keys() - _WORDS)
        if kind not in _KINDS:
            raise ValueError(f"protected {path} has the type {kind!r}: an encrypted value is a string")
        if more:
            raise ValueError(
                f"protected {path} has {more[0]} in its schema, which no encrypted value fits: remove it"
            )
        if subject == AGGREGATE_ID:
            continue
        if _member(schema or {}, subject) is None:
            raise ValueError(
                f"protected {path} names the subject {subject}, which is not in its schema: write the path "
                "of a member, or aggregate_id"
            )
        inside = subject.rpartition(_ITEMS)[0]
        if subject in protected or (inside and not path.startswith(f"{inside}{_ITEMS}.")):
            raise ValueError(
                f"protected {path} cannot have the subject {subject}: name a member in clear, in the same "
                "item or outside of lists"
            )


def _member(root: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the schema of the member of a path, such as ``lines[].name``; None if there is none."""
    schema: Any = root
    found: dict[str, Any] = root
    for step in path.split("."):
        name = step.removesuffix(_ITEMS)
        schema = followed(root, schema)
        schema = (
            followed(root, (schema.get("properties") or {}).get(name)) if isinstance(schema, dict) else None
        )
        if step != name and isinstance(schema, dict):
            schema = followed(root, schema.get("items"))
        if not isinstance(schema, dict):
            return None
        found = schema
    return found
