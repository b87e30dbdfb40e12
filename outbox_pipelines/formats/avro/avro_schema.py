"""Avro schemas as they are used to write and to read: parsed, and without logical types.

Two properties that Avro's readers ignore say what JSON has and Avro has not: `json_name` of a field,
`json_type` of a decimal that is a number in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Container
from datetime import UTC, date, datetime
from typing import Any, Final

import fastavro

PRECISION: Final = 38
"""The digits of a decimal, as many as databases and other languages have."""
NULL: Final = "null"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_DAY: Final = date(1970, 1, 1).toordinal()
# Of fastavro, which takes much for granted; a ValueError also of a reference to another schema.
NO_SCHEMA: Final = (
    *(fastavro.schema.SchemaParseException, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,
)


def parsed(text: str) -> Any:
    """Return a schema, parsed.

    Raises:
        one of `NO_SCHEMA`: it is none, or cannot be read alone.
    """
    return fastavro.parse_schema(json.loads(text))


def plain(schema: Any) -> Any:
    """Return a parsed schema without logical types, which are converted here."""

    def without(part: Any) -> Any:
        if isinstance(part, list):
            return [without(each) for each in part]
        if isinstance(part, dict):
            return {
                name: each if name == "default" else without(each)
                for name, each in part.items()
                if name != "logicalType" and not name.startswith("__")
            }
        return part

    return fastavro.parse_schema(without(schema))


def is_recursive(part: Any, around: tuple[str, ...] = ()) -> bool:
    """Return whether values of a parsed schema can be nested without a limit.

    Args:
        around: the names of the records that this part of a schema is in.
    """
    if isinstance(part, list):
        return any(is_recursive(each, around) for each in part)
    if isinstance(part, dict):
        if part.get("type") in ("record", "error"):
            around = (*around, part["name"])
        return any(is_recursive(part.get(name), around) for name in ("type", "items", "values", "fields"))
    return part in around


def is_empty(schema: Any, names: Container[str] = ()) -> bool:
    """Return whether all values of a schema take no bytes.

    Args:
        names: types with a name of which this is known.
    """
    if isinstance(schema, list):
        return False
    if isinstance(schema, str):
        return schema == NULL or schema in names
    if schema["type"] in ("record", "error"):
        return all(is_empty(each["type"], names) for each in schema["fields"])
    return bool(schema["type"] == NULL or (schema["type"] == "fixed" and schema["size"] == 0))
