"""JSON payloads as Avro and back, by an Avro schema alone.

Written by schemas that `catalog.avro_schemas` derives; read by any. Two properties that Avro's readers ignore
say what JSON has and Avro has not: `json_name` of a field, `json_type` of a decimal that is a number in JSON.

Invariants:
- Pure: the same payload and schema always give the same bytes.
- Nothing is rounded, dropped or made up: a value that Avro cannot have exactly is a `MisfitError` that names
  its place and no content.
- What is read back is what `json.loads` gives for the payload, but that a time is in UTC, a decimal in a
  string has all digits of its scale, and a null of an optional member is absent: Avro has one for both.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from outbox_pipelines.errors import SetupError

try:
    import fastavro
except ImportError:
    raise SetupError("fastavro is missing: pip install 'outbox-pipelines[registry]'") from None

PRECISION: Final = 38
"""The digits of a decimal, as many as databases and other languages have."""
NULL: Final = "null"
_Convert = Callable[[Any], Any]
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DAY: Final = date(1970, 1, 1).toordinal()
_MICROSECOND: Final = timedelta(microseconds=1)
_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.(\d+))?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
).fullmatch
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII).fullmatch
_UUID: Final = re.compile("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_DECIMAL: Final = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII).fullmatch
_PER_SECOND: Final = {"millis": 3, "micros": 6, "nanos": 9}
_TOO_DEEP: Final = "is nested too deeply"
# By the class of a parsed value; an integer is a number, too.
_KINDS: Final = {
    **{type(None): NULL, bool: "a boolean", str: "a string", list: "an array", dict: "an object"},
    **{int: "a number", Decimal: "a number"},
}


class MisfitError(ValueError):
    """A payload does not fit its schema.

    Args:
        why: what is wrong at the place, which those around add.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.place = ""

    def within(self, step: str) -> MisfitError:
        """Return the same error, one step further from the root."""
        self.place = step + self.place
        return self

    def __str__(self) -> str:
        return f"payload{self.place} {self.args[0]}"


def writer(text: str) -> Callable[[str], bytes]:
    """Return a function from a payload, as JSON, to Avro's binary form.

    The function raises `MisfitError` if the payload does not fit, or is not JSON.

    Args:
        text: an Avro schema that `catalog.avro_schemas` has derived.
    """
    parsed = fastavro.parse_schema(json.loads(text))
    convert = _writer(parsed, {})
    plain = _plain(parsed)
    write = fastavro.schemaless_writer

    def encode(payload: str) -> bytes:
        try:
            value = convert(_parse(payload))
            content = io.BytesIO()
            write(content, plain, value)
        except MisfitError:
            raise
        except RecursionError:
            raise MisfitError(_TOO_DEEP) from None
        except ValueError as error:
            # No JSON, a number of thousands of digits, a character that is half of one.
            raise MisfitError(f"cannot be written ({type(error).__name__}): is it JSON?") from None
        return content.getvalue()

    return encode


def reader(text: str) -> Callable[[bytes], Any]:
    """Return a function from Avro's binary form to the payload, as `json.loads` gives it.

    The function raises `ValueError` if the bytes do not fit. Bytes become base64, an infinity stays a float.

    Args:
        text: any Avro schema, the one that the bytes were written with.

    Raises:
        ValueError: it is no Avro schema.
    """
    try:
        parsed = fastavro.parse_schema(json.loads(text))
        convert = _reader(parsed, {})
        plain = _plain(parsed)
    except _NO_SCHEMA as error:
        raise ValueError(f"is no Avro schema that can be read alone: {type(error).__name__}") from None
    except NotImplementedError as error:
        raise ValueError(str(error)) from None

    def decode(content: bytes) -> Any:
        stream = io.BytesIO(content)
        try:
            value = fastavro.schemaless_reader(
                stream, plain, None, return_named_type=True, return_named_type_override=True
            )
            found = convert(value) if convert else value
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        except Exception as error:  # noqa: BLE001 - whatever foreign bytes make fastavro raise
            raise ValueError(f"the bytes do not fit the schema: {type(error).__name__}") from None
        if stream.tell() != len(content):
            raise ValueError("the bytes do not fit the schema: some are left")
        return found

    return decode


def differences(old: str, new: str) -> list[str]:
    """Return what of a new schema cannot read an old one's payloads, or is described in another way."""
    try:
        before, after = (fastavro.parse_schema(json.loads(each)) for each in (old, new))
    except _NO_SCHEMA:
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
                f"{place}: {each} is no value any more"
                for each in old["symbols"]
                if each not in new["symbols"]
            ]
        if kind == "record" and old["name"] == new["name"]:
            before = {each["name"]: each for each in old["fields"]}
            found = []
            for each in new["fields"]:
                within = f"{place}.{each.get('json_name', each['name'])}"
                if each["name"] in before:
                    found += _differences(within, before[each["name"]]["type"], each["type"])
                elif "default" not in each:
                    found.append(f"{within}: is required now, without a default")
            return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [each for pair in zip(old, new, strict=True) for each in _differences(place, *pair)]
    return [] if old == new else [f"{place}: {_named(old)} → {_named(new)}"]


def _named(schema: Any) -> str:
    if isinstance(schema, list):
        return " or ".join(map(_named, schema))
    if isinstance(schema, dict):
        return str(schema.get("logicalType") or schema.get("name") or schema["type"])
    return str(schema)


# Of fastavro, which takes much for granted; a ValueError also of a reference to another schema.
_NO_SCHEMA: Final = (fastavro.schema.SchemaParseException, ValueError, KeyError, TypeError, AttributeError)
_decoder: Final = json.JSONDecoder(
    parse_float=Decimal, parse_constant=lambda name: _raise(ValueError(f"{name} is not JSON"))
)
_parse: Final = _decoder.decode


def _raise(error: Exception) -> Any:
    raise error


def _plain(schema: Any) -> Any:
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


def _misfit(value: Any, wanted: str) -> MisfitError:
    return MisfitError(f"is {_KINDS[type(value)]} in place of {wanted}")


# To Avro.


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
            raise _misfit(value, "an object")
        found = {}
        known = len(value)
        for name, field, convert, is_optional in fields:
            if name in value:
                known -= 1
                try:
                    found[field] = convert(value[name])
                except MisfitError as error:
                    raise error.within(f".{name}") from None
            elif is_optional:
                found[field] = None
            else:
                raise MisfitError("is missing").within(f".{name}")
        if known:
            unknown = next(name for name in value if name not in {each[0] for each in fields})
            raise MisfitError("is not in the schema: add it to the event catalog").within(f".{unknown}")
        return found

    # Before its fields, of which one may be such a record again.
    names[schema["name"]] = write
    for each in schema["fields"]:
        is_optional = "default" in each and each["default"] is None
        convert = _writer(each["type"], names)
        fields.append((each.get("json_name", each["name"]), each["name"], convert, is_optional))
    return write


def _union_writer(schema: list[Any], names: dict[str, _Convert]) -> _Convert:
    """Which branch a value belongs to, its class alone says."""
    branches: dict[type, tuple[str, _Convert]] = {}
    for each in schema:
        if each != NULL:
            name, classes = _branch(each)
            branches |= dict.fromkeys(classes, (name, _writer(each, names)))
    has_null = NULL in schema
    wanted = " or ".join(dict.fromkeys(_KINDS[each] for each in branches))
    if len(schema) == 2 and has_null:
        [(name, convert)] = {*branches.values()}
        return lambda value: None if value is None else (name, convert(value))

    def write(value: Any) -> Any:
        if value is None and has_null:
            return None
        branch = branches.get(type(value))
        if branch is None:
            raise _misfit(value, wanted)
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
            raise _misfit(value, "an array")
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
            raise _misfit(value, "an object")
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
            raise _misfit(value, "a string")
        if value not in symbols:
            raise MisfitError("is none of the values of its enum: add it to the event catalog")
        return value

    return write


def _null(value: Any) -> None:
    if value is not None:
        raise _misfit(value, NULL)


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _misfit(value, "a boolean")
    return value


def _string(value: Any) -> str:
    if type(value) is not str:
        raise _misfit(value, "a string")
    return value


def _long(value: Any) -> int:
    if type(value) is Decimal and value == value.to_integral_value():
        value = int(value)
    if type(value) is not int:
        raise (
            MisfitError("has decimals, and is an integer")
            if type(value) is Decimal
            else _misfit(value, "an integer")
        )
    if not -(1 << 63) <= value < 1 << 63:
        raise MisfitError(
            "does not fit the 64 bits of an integer: describe it as a number with multipleOf: 1"
        )
    return value


def _double(value: Any) -> float:
    if type(value) is not int and type(value) is not Decimal:
        raise _misfit(value, "a number")
    try:
        found = float(value)
        if value == (int(found) if type(value) is int else Decimal(repr(found))):
            return found
    except OverflowError:
        pass
    raise MisfitError("has more digits than a double: describe it with multipleOf, as multipleOf: 0.01")


def _decimal_writer(precision: int, scale: int, *, is_text: bool) -> _Convert:
    def write(value: Any) -> bytes:
        if is_text:
            if type(value) is not str:
                raise _misfit(value, "a string")
            if not _DECIMAL(value):
                raise MisfitError("is no decimal such as 12.50")
            value = Decimal(value)
        elif type(value) is int:
            value = Decimal(value)
        elif type(value) is not Decimal:
            raise _misfit(value, "a number")
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
        raise _misfit(value, "a string")
    found = _TIME(value)
    if found is None:
        raise MisfitError("is no time with an offset, such as 2026-11-27T09:30:00Z")
    if found[1] and found[1][6:].strip("0"):
        raise MisfitError("is more precise than microseconds")
    try:
        return (datetime.fromisoformat(value.upper()) - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        raise MisfitError("is a time that does not exist, or a leap second") from None


def _day(value: Any) -> int:
    if type(value) is not str:
        raise _misfit(value, "a string")
    try:
        if _DAY(value):
            return date.fromisoformat(value).toordinal() - _FIRST_DAY
    except ValueError:
        pass
    raise MisfitError("is no day such as 2026-11-27")


def _uuid(value: Any) -> str:
    if type(value) is not str:
        raise _misfit(value, "a string")
    if not _UUID(value):
        raise MisfitError("is no UUID")
    return value


_WRITERS: Final[Mapping[Any, _Convert]] = {
    **{NULL: _null, "boolean": _boolean, "string": _string, "long": _long, "double": _double},
    **{"timestamp-micros": _time, "date": _day, "uuid": _uuid},
}


# From Avro. None converts nothing.


@dataclass(slots=True)
class _Type:
    """A type with a name, as it is read."""

    values: type
    """The class of its values."""
    convert: _Convert | None = None


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
        if each is None:
            return None
        if kind == "array":
            return lambda value: [each(one) for one in value]
        return lambda value: {name: each(one) for name, one in value.items()}
    convert = _logical_reader(schema) or (_base64 if kind in ("bytes", "fixed") else None)
    if "name" in schema:
        names[schema["name"]] = _Type(str if kind == "enum" else bytes, convert)
    return convert


def _record_reader(schema: dict[str, Any], names: dict[str, _Type]) -> _Convert:
    fields: list[tuple[str, str, _Convert | None, bool]] = []

    def read(value: Any) -> Any:
        found = {}
        for field, name, convert, is_optional in fields:
            each = value[field]
            if each is not None or not is_optional:
                found[name] = each if convert is None else convert(each)
        return found

    names[schema["name"]] = _Type(dict, read)
    for each in schema["fields"]:
        is_optional = "default" in each and each["default"] is None
        convert = _reader(each["type"], names)
        fields.append((each["name"], each.get("json_name", each["name"]), convert, is_optional))
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
            raise NotImplementedError("has a union of types that JSON does not tell apart")

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
        return lambda value: date.fromordinal(value + _FIRST_DAY).isoformat()
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
    text = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
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
