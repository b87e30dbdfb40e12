"""Payloads as JSON from Protobuf's binary form, by the descriptors that a schema registry has.

Invariants:
- Of a payload that `encoding` wrote, it is what `json.loads` gives, but that a time is in UTC, a null is
  absent, and a field that is absent and not `optional` has the value that Protobuf gives it: 0, "", [].
- Foreign bytes are refused or read, and make at most a million members.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from outbox_pipelines.formats.protobuf import message_fields
from outbox_pipelines.formats.protobuf.descriptors import NoMessageError, message_of, parsed

_DEEPEST_INDEX: Final = 100
_MOST_BITS: Final = 32
_MOST_MEMBERS: Final = 1_000_000


def reader(text: str, imports: Mapping[str, str]) -> Callable[[bytes], Any]:
    """Return a function from an index and Protobuf's binary form to the payload, as `json.loads` gives it.

    The function raises `ValueError` if the bytes do not fit.

    Args:
        text: the file, as `descriptors` has it.
        imports: the texts of those that it needs, by their paths.

    Raises:
        ValueError: the file is none that can be read.
    """
    parsed(text)
    known: dict[tuple[int, ...], Any] = {}

    def decode(content: bytes) -> Any:
        indexes, begin = _indexes(content)
        try:
            if indexes not in known:
                known[indexes] = GetMessageClass(message_of(text, imports, [*indexes]))
        except NoMessageError as error:
            raise ValueError(f"the schema {error}") from None
        try:
            return _Reading().payload(known[indexes].FromString(content[begin:]))
        except RecursionError:
            raise ValueError("the value is nested too deeply") from None
        except Exception as error:  # noqa: BLE001 - whatever foreign bytes make the library raise
            raise ValueError(f"the bytes do not fit the schema: {type(error).__name__}") from None

    return decode


def _indexes(content: bytes) -> tuple[tuple[int, ...], int]:
    """Return the index of a message, and where its bytes begin."""
    count, at = _varint(content, 0)
    if not 0 <= count <= _DEEPEST_INDEX:
        raise ValueError("the bytes have no index of a message before them")
    indexes = []
    for _ in range(count):
        index, at = _varint(content, at)
        indexes.append(index)
    return tuple(indexes) or (0,), at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(content) and shift < _MOST_BITS:
        byte = content[at]
        number |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise ValueError("the bytes have no index of a message before them")


class _Reading:
    """One message that is read."""

    def __init__(self) -> None:
        self._left = _MOST_MEMBERS

    def payload(self, message: Any) -> Any:
        descriptor = message.DESCRIPTOR
        name = descriptor.full_name
        if name in message_fields.TEXTS or name in message_fields.VALUES:
            return MessageToDict(message)
        if name in message_fields.WRAPPERS:
            return _scalar(descriptor.fields_by_name["value"], message.value)
        found = {}
        for member, field in message_fields.fields_of(descriptor).items():
            if not field.has_presence or message.HasField(field.name):
                found[member] = self._value(field, getattr(message, field.name))
        self._count(len(found))
        return found

    def _value(self, field: FieldDescriptor, value: Any) -> Any:
        if not message_fields.is_repeated(field):
            return _scalar(field, value) if field.message_type is None else self.payload(value)
        self._count(len(value))
        if message_fields.is_map(field):
            inner = field.message_type.fields_by_name["value"]
            return {_key(key): self._value(inner, value[key]) for key in value}
        if field.message_type is None:
            return [_scalar(field, each) for each in value]
        return [self.payload(each) for each in value]

    def _count(self, members: int) -> None:
        self._left -= members
        if self._left < 0:
            raise ValueError


def _key(key: Any) -> str:
    return ("true" if key else "false") if isinstance(key, bool) else str(key)


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        if field.enum_type.full_name == message_fields.NULL_VALUE:
            return None
        found = field.enum_type.values_by_number.get(value)
        return value if found is None else found.name
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return message_fields.shortest(value) if kind == FieldDescriptor.CPPTYPE_FLOAT else value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
