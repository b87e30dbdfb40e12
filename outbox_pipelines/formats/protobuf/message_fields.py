"""What encoding and decoding share: fields by their names in JSON, and messages that are values there."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VALUES: Final = frozenset({f"google.protobuf.{name}" for name in ("Value", "Struct", "ListValue")})
"""Any JSON."""
TEXTS: Final = {
    "google.protobuf.Timestamp": "a time with an offset, such as 2026-11-27T09:30:00Z",
    "google.protobuf.Duration": "a duration in seconds, such as 1.5s",
    "google.protobuf.FieldMask": "a list of fields, such as total,lines.price",
}
"""What the text of a message is that JSON has as text."""
WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Bytes", "Double", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
)
"""Messages that are their only field in JSON."""
NULL_VALUE: Final = "google.protobuf.NullValue"
NOT_FINITE: Final = frozenset({"NaN", "Infinity", "-Infinity"})


@lru_cache(1000)
def fields_of(descriptor: Descriptor) -> dict[str, FieldDescriptor]:
    """Return the fields by their names in JSON."""
    return {field.json_name: field for field in descriptor.fields}


def is_map(field: FieldDescriptor) -> bool:
    """Return whether a repeated field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def is_repeated(field: Any) -> bool:
    """Return whether a field has many values."""
    return bool(field.is_repeated)


def shortest(value: float) -> float:
    """Return the double with the fewest digits that is this number of 32 bits."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if ctypes.c_float(short).value == value:
            return short
    return float(f"{value:.9g}")
