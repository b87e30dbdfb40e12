"""Descriptors of messages: read from what a compiler writes, and from what a schema registry has.

Invariants:
- Descriptors are data: nothing is generated or run. Each schema has a pool of its own, so that two files of
  one name do not meet.
- The text of a file is base64 of its `FileDescriptorProto`, as Confluent's clients register it, without
  comments and positions in the source.
"""

from __future__ import annotations

import base64
import binascii
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

BUILT_IN: Final = "google/protobuf/"
"""The beginning of the paths of files that every client has."""
_ANY: Final = "google.protobuf.Any"
_File = Any


@dataclass(frozen=True, slots=True)
class File:
    """A file of a descriptor set."""

    path: str
    """As other files import it."""
    text: str
    imports: tuple[File, ...]
    """Without those that every client has."""


class NoMessageError(ValueError):
    """There is no such message, or one that cannot be converted from JSON and to it."""


def file_of(descriptor_set: bytes, message: str) -> File:
    """Return the file that has a message, by its full name.

    Args:
        descriptor_set: a `FileDescriptorSet` with all imports.

    Raises:
        NoMessageError: the message is not in it, an import is missing, or it is none at all.
    """
    found = descriptor_pb2.FileDescriptorSet()
    try:
        found.ParseFromString(descriptor_set)
    except DecodeError:
        raise NoMessageError(
            "is no compiled descriptor set, as `protoc --descriptor_set_out` writes"
        ) from None
    with _usable():
        files = {each.name: each for each in found.file}
        for each in found.file:
            if message in _messages(each.package, each.message_type):
                file = _file(each.name, files)
                message_of(file.text, texts_of(file), message)
                return file
    raise NoMessageError(f"has no message {message}: give its full name, with the package")


def texts_of(file: File) -> dict[str, str]:
    """Return the texts of all files that a file needs, by their paths."""
    texts: dict[str, str] = {}
    for each in file.imports:
        texts |= {each.path: each.text, **texts_of(each)}
    return texts


def message_of(text: str, imports: Mapping[str, str], which: str | list[int]) -> Descriptor:
    """Return the descriptor of a message of a file.

    Args:
        imports: the texts of the files that it needs, by their paths.
        which: its full name, or its index in the file, and for a nested one those within messages.

    Raises:
        NoMessageError: the file does not have it, or is none that can be read.
    """
    pool = descriptor_pool.DescriptorPool()
    with _usable():
        file = parsed(text)
        _add(pool, file, file.name or "schema.proto", imports, set())
        name = which if isinstance(which, str) else _name_at(file, which)
        descriptor: Descriptor = pool.FindMessageTypeByName(name)
        if _ANY in _needed(descriptor, set()):
            raise NoMessageError(
                f"has a field of {_ANY}, whose type only its writer knows: use oneof, or bytes"
            )
    return descriptor


@contextmanager
def _usable() -> Iterator[None]:
    try:
        yield
    except NoMessageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever foreign descriptors make the library raise
        raise NoMessageError(f"is no file that can be used: {type(error).__name__}") from None


def indexes_of(descriptor: Descriptor) -> list[int]:
    """Return the index of a message in its file, and for a nested one those within messages."""
    indexes: list[int] = []
    around = descriptor
    while (outer := around.containing_type) is not None:
        indexes.insert(0, [each.full_name for each in outer.nested_types].index(around.full_name))
        around = outer
    names = [each.full_name for each in around.file.message_types_by_name.values()]
    return [names.index(around.full_name), *indexes]


def _messages(package: str, types: Iterable[_File]) -> Iterator[str]:
    for each in types:
        name = f"{package}.{each.name}" if package else each.name
        yield name
        yield from _messages(name, each.nested_type)


def _file(path: str, files: Mapping[str, _File], around: tuple[str, ...] = ()) -> File:
    file = files.get(path)
    if file is None or path in around:
        raise NoMessageError(f"lacks the import {path}: compile it with --include_imports")
    file.ClearField("source_code_info")
    imports = [
        _file(each, files, (*around, path)) for each in file.dependency if not each.startswith(BUILT_IN)
    ]
    text = base64.b64encode(file.SerializeToString(deterministic=True)).decode()
    return File(path, text, tuple(imports))


def parsed(text: str) -> Any:
    """Return a file as its compiler has described it; raise `NoMessageError` if the text is none."""
    try:
        return descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (DecodeError, binascii.Error, ValueError):
        raise NoMessageError("is not registered as base64 of its descriptor, which alone is read") from None


def _add(pool: Any, file: _File, path: str, imports: Mapping[str, str], added: set[str]) -> None:
    """Add a file, and first what it needs."""
    if path in added:
        return
    added.add(path)
    for each in file.dependency:
        if each in imports:
            _add(pool, parsed(imports[each]), each, imports, added)
        elif each.startswith(BUILT_IN):
            _add_built_in(pool, each)
    file.name = path
    _require_maps(file.message_type)
    pool.AddSerializedFile(file.SerializeToString())


def _require_maps(types: Iterable[_File]) -> None:
    """Raise `NoMessageError` for an entry of a map that no compiler writes: the library crashes at it."""
    for each in types:
        if each.options.map_entry:
            found = [(field.name, field.number, field.label) for field in each.field]
            if found != [("key", 1, 1), ("value", 2, 1)] or each.oneof_decl:
                raise NoMessageError(f"has an entry of a map that is none: {each.name}")
        _require_maps(each.nested_type)


def _add_built_in(pool: Any, path: str) -> None:
    name = path.removesuffix(".proto").removeprefix(BUILT_IN)
    if not name.isidentifier():
        raise KeyError(path)
    file = importlib.import_module(f"google.protobuf.{name}_pb2").DESCRIPTOR
    for each in file.dependencies:
        _add_built_in(pool, each.name)
    pool.AddSerializedFile(file.serialized_pb)


def _name_at(file: _File, indexes: list[int]) -> str:
    types, names = file.message_type, [file.package] if file.package else []
    for index in indexes:
        if not 0 <= index < len(types):
            raise NoMessageError(f"has no message with the index {index}, which stands before the value")
        names.append(types[index].name)
        types = types[index].nested_type
    return ".".join(names)


def _needed(descriptor: Descriptor, seen: set[str]) -> set[str]:
    """Return the names of all messages that a message can have in it."""
    waiting = [descriptor]
    while waiting:
        each = waiting.pop()
        if each.full_name not in seen:
            seen.add(each.full_name)
            waiting += [field.message_type for field in each.fields if field.message_type is not None]
    return seen
