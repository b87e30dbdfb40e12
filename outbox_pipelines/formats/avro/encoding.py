"""JSON payloads in Avro's binary form, by schemas that `catalog.avro_schemas` derives.

Invariants:
- Pure: the same payload and schema always give the same bytes.
- Nothing is rounded, dropped or made up: a value that Avro cannot have exactly is a `MisfitError` that names
  its place and no content.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import fastavro

from outbox_pipelines.core.misfits import (
    KINDS,
    TOO_DEEP,
    MisfitError,
    exact_double,
    misfit,
    parse,
    too_deep,
)
from outbox_pipelines.formats.avro.avro_schema import EPOCH, FIRST_DAY, NULL, is_recursive, parsed, plain

_Convert = Callable[[Any], Any]
# Of an integer with an exponent, which could be of any length.
_MOST_DIGITS: Final = 20
_MICROSECOND: Final = timedelta(microseconds=1)
_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.(\d+))?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
).fullmatch
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII).fullmatch
_UUID: Final = re.compile("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_DECIMAL: Final = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII).fullmatch


def writer(text: str) -> Callable[[str], bytes]:
    """Return a function from a payload, as JSON, to Avro's binary form.

    The function raises `MisfitError` if the payload does not fit, or is not JSON.

    Args:
        text: an Avro schema that `catalog.avro_schemas` has derived.
    """
    schema = parsed(text)
    convert = _writer(schema, {})
    bare = plain(schema)
    has_depth = is_recursive(schema)
    write = fastavro.schemaless_writer

    def encode(payload: str) -> bytes:
        try:
            given = parse(payload)
            if has_depth and (refusal := too_deep(given)):
                raise refusal
            value = convert(given)
            content = io.BytesIO()
            write(content, bare, value)
        except MisfitError:
            raise
        except RecursionError:
            raise MisfitError(TOO_DEEP) from None
        except ValueError as error:
            # No JSON, a number of thousands of digits, a character that is half of one.
            raise MisfitError(f"cannot be written ({type(error).__name__}): is it JSON?") from None
        return content.getvalue()

    return encode


def _writer(schema: Any, names: dict[str, _Convert]) -> _Convert:
    """Return what checks and converts a parsed value."""
    if isinstance(schema, list):
        return _union_writer(schema, names)
    if isinstance(schema, str):
        return _WRITERS.get(schema) or (lambda value: names[schema](value))
    kind = schema["type"]
    if kind == "record":
        return _record_writer(schema, names)
    if kind == "enum":
        write = names[schema["name"]] = _enum_writer(frozenset(schema["symbols"]))
        return write
    if kind == "array":
        return _array_writer(_writer(schema["items"], names))
    if kind == "map":
        return _map_writer(_writer(schema["values"], names))
    logical = schema.get("logicalType")
    if logical == "decimal":
        return _decimal_writer(schema["precision"], schema["scale"], is_text="json_type" not in schema)
    return _WRITERS.get(logical) or _WRITERS[kind]


def _record_writer(schema: dict[str, Any], names: dict[str, _Convert]) -> _Convert:
    fields: list[tuple[str, str, _Convert, bool]] = []

    def write(value: Any) -> Any:
        if type(value) is not dict:
            raise misfit(value, "an object")
        record = {}
        known = len(value)
        for name, field, convert, is_optional in fields:
            if name in value:
                known -= 1
                try:
                    record[field] = convert(value[name])
                except MisfitError as error:
                    raise error.within(f".{name}") from None
            elif is_optional:
                record[field] = None
            else:
                raise MisfitError("is missing").within(f".{name}")
        if known:
            unknown = next(name for name in value if name not in {member[0] for member in fields})
            raise MisfitError("is not in the schema: add it to the event catalog").within(f".{unknown}")
        return record

    # Before its fields, of which one may be such a record again.
    names[schema["name"]] = write
    for member in schema["fields"]:
        is_optional = "default" in member and member["default"] is None
        convert = _writer(member["type"], names)
        fields.append((member.get("json_name", member["name"]), member["name"], convert, is_optional))
    return write


def _union_writer(schema: list[Any], names: dict[str, _Convert]) -> _Convert:
    """Which branch a value belongs to, its class alone says."""
    branches: dict[type, tuple[str, _Convert]] = {}
    for each in schema:
        if each != NULL:
            name, classes = _branch(each)
            branches |= dict.fromkeys(classes, (name, _writer(each, names)))
    has_null = NULL in schema
    wanted = " or ".join(dict.fromkeys(KINDS[each] for each in branches))
    if len(schema) == 2 and has_null:
        [(name, convert)] = {*branches.values()}
        return lambda value: None if value is None else (name, convert(value))

    def write(value: Any) -> Any:
        if value is None and has_null:
            return None
        branch = branches.get(type(value))
        if branch is None:
            raise misfit(value, wanted)
        return branch[0], branch[1](value)

    return write


def _branch(schema: Any) -> tuple[str, tuple[type, ...]]:
    """Return what fastavro calls a part of a union, and the classes of its values."""
    if isinstance(schema, str):
        # A record, if it is no type of Avro.
        return schema, _CLASSES.get(schema, (dict,))
    kind = schema["type"]
    if kind == "bytes" and "json_type" in schema:
        return kind, (int, Decimal)
    if "logicalType" in schema:
        return kind, (str,)
    return schema.get("name", kind), _CLASSES.get(kind, (dict,))


_CLASSES: Final[Mapping[str, tuple[type, ...]]] = {
    **{"boolean": (bool,), "string": (str,), "enum": (str,), "array": (list,)},
    **{"long": (int, Decimal), "double": (int, Decimal)},
}


def _array_writer(convert: _Convert) -> _Convert:
    def write(value: Any) -> Any:
        if type(value) is not list:
            raise misfit(value, "an array")
        found: list[Any] = []
        try:
            for each in value:
                found.append(convert(each))
        except MisfitError as error:
            raise error.within(f"[{len(found)}]") from None
        return found

    return write


def _map_writer(convert: _Convert) -> _Convert:
    def write(value: Any) -> Any:
        if type(value) is not dict:
            raise misfit(value, "an object")
        found = {}
        for name, each in value.items():
            try:
                found[name] = convert(each)
            except MisfitError as error:
                raise error.within(f".{name}") from None
        return found

    return write


def _enum_writer(symbols: frozenset[str]) -> _Convert:
    def write(value: Any) -> Any:
        if type(value) is not str:
            raise misfit(value, "a string")
        if value not in symbols:
            raise MisfitError("is none of the values of its enum: add it to the event catalog")
        return value

    return write


def _null(value: Any) -> None:
    if value is not None:
        raise misfit(value, NULL)


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise misfit(value, "a boolean")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise misfit(value, "a string")
    return value


def _long(value: Any) -> int:
    if type(value) is Decimal and value.adjusted() < _MOST_DIGITS:
        if value != value.to_integral_value():
            raise MisfitError("has decimals, and is an integer")
        value = int(value)
    if type(value) not in (int, Decimal):
        raise misfit(value, "an integer")
    if type(value) is Decimal or not -(1 << 63) <= value < 1 << 63:
        raise MisfitError(
            "does not fit the 64 bits of an integer: describe it as a number with multipleOf: 1"
        )
    return int(value)


def _double(value: Any) -> float:
    if type(value) is not int and type(value) is not Decimal:
        raise misfit(value, "a number")
    if (found := exact_double(value)) is None:
        raise MisfitError("has more digits than a double: describe it with multipleOf, as multipleOf: 0.01")
    return found


def _decimal_writer(precision: int, scale: int, *, is_text: bool) -> _Convert:
    def write(value: Any) -> bytes:
        if is_text:
            if type(value) is not str:
                raise misfit(value, "a string")
            if not _DECIMAL(value):
                raise MisfitError("is no decimal such as 12.50")
            value = Decimal(value)
        elif type(value) is int:
            value = Decimal(value)
        elif type(value) is not Decimal:
            raise misfit(value, "a number")
        sign, digits, exponent = value.as_tuple()
        # Not by arithmetic with decimals, which rounds.
        more = exponent + scale
        if value and value.adjusted() + scale >= precision:
            raise MisfitError(f"has more than {precision - scale} digits before the point")
        if more < 0:
            if any(digits[more:]):
                raise MisfitError(f"has more than {scale} decimals, the number of its multipleOf")
            digits = digits[:more]
        number = int("".join(map(str, digits)) or "0") * 10 ** max(more, 0) if value else 0
        return (-number if sign else number).to_bytes(number.bit_length() // 8 + 1, "big", signed=True)

    return write


def _time(value: Any) -> int:
    if type(value) is not str:
        raise misfit(value, "a string")
    found = _TIME(value)
    if found is None:
        raise MisfitError("is no time with an offset, such as 2026-11-27T09:30:00Z")
    if found[1] and found[1][6:].strip("0"):
        raise MisfitError("is more precise than microseconds")
    try:
        return (datetime.fromisoformat(value.upper()) - EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        raise MisfitError("is a time that does not exist, or a leap second") from None


def _day(value: Any) -> int:
    if type(value) is not str:
        raise misfit(value, "a string")
    try:
        if _DAY(value):
            return date.fromisoformat(value).toordinal() - FIRST_DAY
    except ValueError:
        pass
    raise MisfitError("is no day such as 2026-11-27")


def _uuid(value: Any) -> str:
    if type(value) is not str:
        raise misfit(value, "a string")
    if not _UUID(value):
        raise MisfitError("is no UUID")
    return value


_WRITERS: Final[Mapping[Any, _Convert]] = {
    **{NULL: _null, "boolean": _boolean, "string": _string, "long": _long, "double": _double},
    **{"timestamp-micros": _time, "date": _day, "uuid": _uuid},
}
