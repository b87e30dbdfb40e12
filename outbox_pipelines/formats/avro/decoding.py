"""Payloads as JSON from Avro's binary form, by any Avro schema.

Invariants:
- Of a payload that `encoding` wrote, it is what `json.loads` gives, but that a time is in UTC, a decimal in a
  string has all digits of its scale, and a null of an optional member is absent: Avro has one for both.
- Foreign bytes are refused or read: none exhausts the stack of the process.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Final

import fastavro

# Private: fastavro has no public name for its reader in Python, and no limit of depth in the one in C.
from fastavro._read_py import schemaless_reader as read_in_python

from outbox_pipelines.formats.avro.avro_schema import (
    EPOCH,
    FIRST_DAY,
    NO_SCHEMA,
    NULL,
    is_empty,
    is_recursive,
    parsed,
    plain,
)

# None converts nothing.
_Convert = Callable[[Any], Any]
_MOST_EMPTIES: Final = 100
_PER_SECOND: Final = {"millis": 3, "micros": 6, "nanos": 9}


class UnreadableSchemaError(ValueError):
    """A schema is one of Avro, and its values cannot become JSON."""


def reader(text: str) -> Callable[[bytes], Any]:
    """Return a function from Avro's binary form to the payload, as `json.loads` gives it.

    The function raises `ValueError` if the bytes do not fit. Bytes become base64, an infinity stays a float.

    Args:
        text: any Avro schema, the one that the bytes were written with.

    Raises:
        UnreadableSchemaError: its values cannot become JSON.
        ValueError: it is no Avro schema.
    """
    try:
        schema = parsed(text)
        convert = _reader(schema, {})
        bare = plain(schema)
        # The reader in C has no limit of depth, and ends the process; Python has one.
        read = read_in_python if is_recursive(bare) else fastavro.schemaless_reader
    except UnreadableSchemaError:
        raise
    except NO_SCHEMA as error:
        raise ValueError(f"is no Avro schema that can be read alone: {type(error).__name__}") from None

    def decode(content: bytes) -> Any:
        stream = io.BytesIO(content)
        try:
            value = read(stream, bare, None, return_named_type=True, return_named_type_override=True)
            found = convert(value) if convert else value
        except RecursionError:
            raise ValueError("the value is nested too deeply") from None
        except Exception as error:  # noqa: BLE001 - whatever foreign bytes make fastavro raise
            raise ValueError(f"the bytes do not fit the schema: {type(error).__name__}") from None
        if stream.tell() != len(content):
            raise ValueError("the bytes do not fit the schema: some are left")
        return found

    return decode


@dataclass(slots=True)
class _Type:
    """A type with a name, as it is read."""

    values: type
    """The class of its values."""
    convert: _Convert | None = None
    empties: int = 0
    """How many values without bytes one of its values is, with all its parts; 0 if it takes bytes."""


def _empty(names: Mapping[str, _Type]) -> set[str]:
    return {name for name, each in names.items() if each.empties}


def _empties(schema: Any, names: Mapping[str, _Type]) -> int:
    name = schema.get("name", "") if isinstance(schema, dict) else schema if isinstance(schema, str) else ""
    return names[name].empties if name in names else int(is_empty(schema))


def _reader(schema: Any, names: dict[str, _Type]) -> _Convert | None:
    """Return what makes a value as fastavro reads it one as JSON has it."""
    if isinstance(schema, list):
        return _union_reader(schema, names)
    if isinstance(schema, str):
        if schema in _READ_CLASSES:
            return _base64 if schema == "bytes" else None
        # It may be around this one, whose reader is not made yet.
        named = names[schema]
        return lambda value: named.convert(value) if named.convert else value
    kind = schema["type"]
    if kind in ("record", "error"):
        return _record_reader(schema, names)
    if kind in ("array", "map"):
        each = _reader(schema["items" if kind == "array" else "values"], names)
        if kind == "array" and is_empty(schema["items"], _empty(names)):
            # A few bytes could say that there are billions of them.
            raise UnreadableSchemaError("has an array of items that take no bytes")
        if each is None:
            return None
        if kind == "array":
            return lambda value: [each(one) for one in value]
        return lambda value: {name: each(one) for name, one in value.items()}
    convert = _logical_reader(schema) or (_base64 if kind in ("bytes", "fixed") else None)
    if "name" in schema:
        names[schema["name"]] = _Type(str if kind == "enum" else bytes, convert, int(is_empty(schema)))
    return convert


def _record_reader(schema: dict[str, Any], names: dict[str, _Type]) -> _Convert:
    fields: list[tuple[str, str, _Convert | None, bool]] = []

    def read(value: Any) -> Any:
        record = {}
        for field, name, convert, is_optional in fields:
            content = value[field]
            if content is not None or not is_optional:
                record[name] = content if convert is None else convert(content)
        return record

    names[schema["name"]] = _Type(dict, read)
    for member in schema["fields"]:
        is_optional = "default" in member and member["default"] is None
        convert = _reader(member["type"], names)
        fields.append((member["name"], member.get("json_name", member["name"]), convert, is_optional))
    empties = [_empties(member["type"], names) for member in schema["fields"]]
    if sum(empties) > _MOST_EMPTIES:
        # Each level of records may have two of the level below, and no byte ends that.
        raise UnreadableSchemaError(f"has a record with more than {_MOST_EMPTIES} parts that take no bytes")
    names[schema["name"]].empties = 1 + sum(empties) if all(empties) else 0
    return read


def _union_reader(schema: list[Any], names: dict[str, _Type]) -> _Convert | None:
    """Of several types with a name fastavro gives the name beside the value; others differ in their class."""
    converts = {_name(each): _reader(each, names) for each in schema}
    others = [each for each in converts if each != NULL]
    if len(others) == 1:
        only = converts[others[0]]
        return only and (lambda value: None if value is None else only(value))
    named = [each for each in others if each in names]
    if len(named) == 1:
        named = []
    by_class: dict[type, _Convert | None] = {}
    for each in (each for each in converts if each not in named):
        values = _READ_CLASSES[each] if each in _READ_CLASSES else names[each].values
        if by_class.setdefault(values, converts[each]) is not converts[each]:
            raise UnreadableSchemaError("has a union of types that JSON does not tell apart")

    def read(value: Any) -> Any:
        if type(value) is tuple:
            name, value = value
            convert = converts[name]
        else:
            convert = by_class[type(value)]
        return convert(value) if convert else value

    return read


def _name(schema: Any) -> str:
    """Return what the parts of a union differ in."""
    return schema if isinstance(schema, str) else str(schema.get("name", schema["type"]))


_READ_CLASSES: Final[Mapping[str, type]] = {
    **{NULL: type(None), "boolean": bool, "int": int, "long": int, "float": float, "double": float},
    **{"string": str, "bytes": bytes, "array": list, "map": dict},
}


def _logical_reader(schema: dict[str, Any]) -> _Convert | None:
    """As Avro's specification has them; of one that is not known the value stays as it is."""
    kind, logical = schema["type"], schema.get("logicalType", "")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal_reader(schema.get("scale", 0), is_text="json_type" not in schema)
    if logical == "date" and kind == "int":
        return lambda value: date.fromordinal(value + FIRST_DAY).isoformat()
    what, _, unit = logical.rpartition("-")
    if kind in ("int", "long") and unit in _PER_SECOND:
        digits = _PER_SECOND[unit]
        if what == "time":
            return lambda value: _instant(value, digits)[11:]
        if what in ("timestamp", "local-timestamp"):
            zone = "Z" if what == "timestamp" else ""
            return lambda value: _instant(value, digits) + zone
    return None


def _instant(value: int, digits: int) -> str:
    seconds, rest = divmod(value, 10**digits)
    text = (EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
    return f"{text}.{rest:0{digits}d}".rstrip("0") if rest else text


def _decimal_reader(scale: int, *, is_text: bool) -> _Convert:
    def read(value: bytes) -> Any:
        number = int.from_bytes(value, "big", signed=True)
        if not is_text and scale == 0:
            return number
        text = f"{Decimal(f'{number}e-{scale}'):f}"
        return text if is_text else float(text)

    return read


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
