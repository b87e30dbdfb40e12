"""JSON payloads in Protobuf's binary form.

Invariants:
- Pure: the same payload and message always give the same bytes.
- Nothing is rounded, dropped or made up, except that null is absent: what a message cannot have exactly is a
  `MisfitError` that names its place and no content.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.message_factory import GetMessageClass

from outbox_pipelines.core.misfits import MisfitError, deepest, exact_double, misfit, parse
from outbox_pipelines.formats.protobuf.descriptors import indexes_of
from outbox_pipelines.formats.protobuf.message_fields import (
    NOT_FINITE,
    NULL_VALUE,
    TEXTS,
    VALUES,
    WRAPPERS,
    fields_of,
    is_map,
    is_repeated,
    shortest,
)

_TYPE: Final = FieldDescriptor
_BITS: Final = {
    _TYPE.CPPTYPE_INT32: (-(1 << 31), 1 << 31, 32),
    _TYPE.CPPTYPE_UINT32: (0, 1 << 32, 32),
    _TYPE.CPPTYPE_INT64: (-(1 << 63), 1 << 63, 64),
    _TYPE.CPPTYPE_UINT64: (0, 1 << 64, 64),
}
"""Of integers: the least, what follows the largest, and how many bits they have."""
# A reader's limit; what is any JSON has several messages for each of its levels.
_TOO_DEEP: Final = (
    "is nested too deeply: readers of Protobuf accept 100 messages in each other, and a level of a "
    "google.protobuf.Value counts up to three times"
)
# Of an integer with an exponent, which could be of any length.
_MOST_DIGITS: Final = 20


def writer(descriptor: Descriptor) -> Callable[[str], bytes]:
    """Return a function from a payload, as JSON, to Protobuf's binary form.

    The function raises `MisfitError` if the payload does not fit, or is not JSON.
    """
    create = GetMessageClass(descriptor)

    def encode(payload: str) -> bytes:
        given = None
        try:
            message, given = create(), parse(payload)
            _fill(message, given)
            content: bytes = message.SerializeToString(deterministic=True)
            # Readers have a limit of depth.
            create.FromString(content)
        except MisfitError:
            raise
        except EncodeError:
            raise MisfitError("lacks a required field, or one within it does") from None
        except (RecursionError, DecodeError):
            raise deepest(given, _TOO_DEEP) from None
        except ValueError as error:
            # No JSON, a number of thousands of digits, a character that is half of one.
            raise MisfitError(f"cannot be written ({type(error).__name__}): is it JSON?") from None
        return content

    return encode


def index_of(descriptor: Descriptor) -> bytes:
    """Return which message of its file it is, as Confluent's clients write it before the value.

    That is the number of indexes and each of them, or 0 for the first message.
    """
    indexes = indexes_of(descriptor)
    if indexes == [0]:
        return b"\0"
    return b"".join(_varint(each << 1) for each in (len(indexes), *indexes))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _fill(message: Any, value: Any) -> None:
    """Give a message the fields of a parsed value."""
    descriptor = message.DESCRIPTOR
    name = descriptor.full_name
    if name in TEXTS:
        _fill_text(message, value)
    elif name in VALUES:
        _fill_value(message, value)
    elif name in WRAPPERS:
        message.value = _scalar(descriptor.fields_by_name["value"], value)
    elif type(value) is not dict:
        raise misfit(value, "an object")
    else:
        fields, chosen = fields_of(descriptor), set()
        for member, each in value.items():
            try:
                if (field := fields.get(member)) is None:
                    raise MisfitError(_unknown(descriptor, member))
                if each is None and not _takes_null(field):
                    continue
                if (oneof := field.containing_oneof) is not None:
                    if oneof.name in chosen:
                        raise MisfitError(f"is the second member of the oneof {oneof.name}")
                    chosen.add(oneof.name)
                _set(message, field, each)
            except MisfitError as error:
                raise error.within(f".{member}") from None


def _unknown(descriptor: Descriptor, member: str) -> str:
    if (field := descriptor.fields_by_name.get(member)) is not None:
        return (
            f"is called {field.json_name} in JSON: rename the member, or add [json_name = "
            f'"{member}"] to the field'
        )
    return f"is no field of {descriptor.full_name}: add it there"


def _takes_null(field: FieldDescriptor) -> bool:
    if field.message_type is not None:
        return not is_repeated(field) and field.message_type.full_name == "google.protobuf.Value"
    return field.enum_type is not None and field.enum_type.full_name == NULL_VALUE


def _set(message: Any, field: FieldDescriptor, value: Any) -> None:
    if not is_repeated(field):
        if field.message_type is None:
            setattr(message, field.name, _scalar(field, value))
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            _fill(inner, value)
    elif is_map(field):
        _set_map(getattr(message, field.name), field, value)
    else:
        if type(value) is not list:
            raise misfit(value, "an array")
        values = getattr(message, field.name)
        for n, each in enumerate(value):
            try:
                if field.message_type is None:
                    values.append(_scalar(field, each))
                else:
                    _fill(values.add(), each)
            except MisfitError as error:
                raise error.within(f"[{n}]") from None


def _set_map(values: Any, field: FieldDescriptor, value: Any) -> None:
    if type(value) is not dict:
        raise misfit(value, "an object")
    entry = field.message_type.fields_by_name
    for name, each in value.items():
        try:
            key = _key(entry["key"], name)
            if entry["value"].message_type is None:
                values[key] = _scalar(entry["value"], each)
            else:
                _fill(values[key], each)
        except MisfitError as error:
            raise error.within(f".{name}") from None


def _key(field: FieldDescriptor, name: str) -> Any:
    if field.cpp_type == _TYPE.CPPTYPE_STRING:
        return name
    if field.cpp_type == _TYPE.CPPTYPE_BOOL and name in ("true", "false"):
        return name == "true"
    if field.cpp_type in _BITS and _is_digits(name):
        return _scalar(field, int(name))
    raise MisfitError("is no key of this map")


def _is_digits(text: str) -> bool:
    """Return whether a text is an integer as JSON writes it."""
    return (
        len(text) <= _MOST_DIGITS
        and text.isascii()
        and text.removeprefix("-").isdecimal()
        and (str(int(text)) == text)
    )


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        return _integer(value, *_BITS[kind])
    if kind == _TYPE.CPPTYPE_ENUM:
        return _enum(field, value)
    if kind == _TYPE.CPPTYPE_BOOL:
        if type(value) is not bool:
            raise misfit(value, "a boolean")
        return value
    if kind in (_TYPE.CPPTYPE_DOUBLE, _TYPE.CPPTYPE_FLOAT):
        return _number(value, is_single=kind == _TYPE.CPPTYPE_FLOAT)
    if type(value) is not str:
        raise misfit(value, "a string")
    if field.type != _TYPE.TYPE_BYTES:
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise MisfitError("is not base64") from None


def _integer(value: Any, least: int, end: int, bits: int) -> int:
    if type(value) is str and bits == 64:
        # As other programs write these in JSON.
        if not _is_digits(value):
            raise MisfitError("is no integer")
        value = int(value)
    if type(value) is Decimal and value.adjusted() < _MOST_DIGITS:
        if value != value.to_integral_value():
            raise MisfitError("has decimals, and is an integer")
        value = int(value)
    if type(value) not in (int, Decimal):
        raise misfit(value, "an integer")
    if type(value) is Decimal or not least <= value < end:
        raise MisfitError(f"does not fit the {bits} bits of an integer")
    return int(value)


def _enum(field: FieldDescriptor, value: Any) -> int:
    if field.enum_type.full_name == NULL_VALUE and value is None:
        return 0
    if type(value) is not str:
        raise misfit(value, "the name of a value of its enum")
    found = field.enum_type.values_by_name.get(value)
    if found is None:
        raise MisfitError(f"is no value of the enum {field.enum_type.full_name}: add it there")
    return int(found.number)


def _number(value: Any, *, is_single: bool) -> float:
    if type(value) is str and value in NOT_FINITE:
        return float(value)
    if type(value) not in (int, Decimal):
        raise misfit(value, "a number")
    if (found := exact_double(value)) is None:
        raise MisfitError("has more digits than a double: use a string")
    if is_single:
        single = ctypes.c_float(found).value
        if math.isinf(single) or shortest(single) != found:
            raise MisfitError("has more digits than a float: use a double")
        return single
    return found


def _fill_text(message: Any, value: Any) -> None:
    wanted = TEXTS[message.DESCRIPTOR.full_name]
    if type(value) is not str:
        raise misfit(value, "a string")
    try:
        message.FromJsonString(value)
    except (ValueError, OverflowError):
        raise MisfitError(f"is not {wanted}") from None


def _fill_value(message: Any, value: Any) -> None:
    """Give a message that can be any JSON its value."""
    name = message.DESCRIPTOR.name
    if name == "Value":
        if value is None:
            message.null_value = 0
        elif type(value) is bool:
            message.bool_value = value
        elif type(value) is str:
            message.string_value = value
        elif type(value) is dict:
            message.struct_value.SetInParent()
            _fill_value(message.struct_value, value)
        elif type(value) is list:
            message.list_value.SetInParent()
            _fill_value(message.list_value, value)
        else:
            message.number_value = _number(value, is_single=False)
    elif name == "Struct":
        if type(value) is not dict:
            raise misfit(value, "an object")
        for member, each in value.items():
            try:
                _fill_value(message.fields[member], each)
            except MisfitError as error:
                raise error.within(f".{member}") from None
    else:
        if type(value) is not list:
            raise misfit(value, "an array")
        for n, each in enumerate(value):
            try:
                _fill_value(message.values.add(), each)
            except MisfitError as error:
                raise error.within(f"[{n}]") from None
