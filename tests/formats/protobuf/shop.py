"""Descriptors of a shop's messages, as a compiler writes them: two files, with nested and later messages."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2

_TYPE: Any = descriptor_pb2.FieldDescriptorProto
_REPEATED = 3
MESSAGE = "shop.v1.Placed"


def _field(message: Any, name: str, kind: str, **more: Any) -> None:
    """A field of a type of Protobuf, or of a message or an enum by its full name."""
    number = len(message.field) + 1
    field = message.field.add(name=name, number=number, label=_REPEATED if more.pop("many", False) else 1)
    if kind.startswith("enum "):
        field.type, field.type_name = _TYPE.TYPE_ENUM, f".{kind[5:]}"
    elif "." in kind:
        field.type, field.type_name = _TYPE.TYPE_MESSAGE, f".{kind}"
    else:
        field.type = getattr(_TYPE, f"TYPE_{kind.upper()}")
    if more.pop("optional", False):
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    for option, value in more.items():
        setattr(field, option, value)


def _file(name: str, *imports: str) -> Any:
    return descriptor_pb2.FileDescriptorProto(
        name=name, package="shop.v1", syntax="proto3", dependency=imports
    )


def descriptor_set(*, more: str = "", n: str = "int32", comment: str = "") -> bytes:
    """Return the compiled files.

    Args:
        more: a further field of `Placed`.
        n: the type of a field.
        comment: in the source.
    """
    common = _file("shop/common.proto")
    line = common.message_type.add(name="Line")
    _field(line, "sku", "string")
    _field(line, "n", "int64", optional=True)
    state = common.enum_type.add(name="State")
    for number, name in enumerate(("NONE", "PAID")):
        state.value.add(name=name, number=number)
    built_in = [
        f"google/protobuf/{name}.proto" for name in ("timestamp", "duration", "struct", "wrappers", "any")
    ]
    order = _file("shop/order.proto", "shop/common.proto", *built_in)
    order.message_type.add(name="First")
    placed = order.message_type.add(name="Placed")
    placed.oneof_decl.add(name="way")
    for name, kind in (
        *(("n", n), ("big", "int64"), ("large", "uint64"), ("price", "double"), ("ratio", "float")),
        *(("raw", "bytes"), ("state", "enum shop.v1.State"), ("is_paid", "bool")),
        *(("at", "google.protobuf.Timestamp"), ("took", "google.protobuf.Duration")),
        *(("more", "google.protobuf.Struct"), ("any", "google.protobuf.Value")),
        *(("wrapped", "google.protobuf.Int64Value"), ("of", MESSAGE)),
    ):
        _field(placed, name, kind)
    _field(placed, "lines", "shop.v1.Line", many=True)
    _field(placed, "tags", "string", many=True)
    entry = placed.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    _field(entry, "key", "int32")
    _field(entry, "value", "shop.v1.Line")
    _field(placed, "counts", f"{MESSAGE}.CountsEntry", many=True)
    _field(placed, "mail", "string", oneof_index=0)
    _field(placed, "phone", "string", oneof_index=0)
    _field(placed, "note", "string", optional=True)
    _field(placed, "order_id", "string", json_name="order_id")
    if more:
        _field(placed, more, "string", optional=True)
    inner = placed.nested_type.add(name="Inner")
    _field(inner, "n", "int32")
    _field(order.message_type.add(name="Opaque"), "any", "google.protobuf.Any")
    if comment:
        order.source_code_info.location.add(path=[4, 0], span=[0, 0, 0], leading_comments=comment)
    made: bytes = descriptor_pb2.FileDescriptorSet(file=[common, order]).SerializeToString()
    return made
