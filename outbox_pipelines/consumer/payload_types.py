"""Convert a payload to the handler's type: a pydantic model, a dataclass, plain JSON, or bytes.

Invariants:
- pydantic is used where the application has loaded it, and never imported.
- An unsupported type is rejected when the handler is registered.
- An invalid payload is rejected with the path of the member and without its value. Members that a type does
  not have are ignored: a producer can add some.
- A member that was erased is no error where its type can be missing: a dataclass gets `ERASED` whatever the
  annotation, a model the text `outbox-erased`, or None where it takes no such text.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final
from uuid import UUID

from outbox_pipelines.core.erased import ERASED
from outbox_pipelines.errors import SetupError

# A value and its path, as the value that is meant.
Convert = Callable[[Any, str], Any]
_MOST_ERRORS: Final = 5
_LISTS: Final[dict[Any, Callable[[list[Any]], Any]]] = {
    list: list,
    collections.abc.Sequence: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
}
_FROM_TEXT: Final[dict[Any, Callable[[str], Any]]] = {
    datetime: datetime.fromisoformat,
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
}

_NAMES: Final[dict[Any, str]] = {
    bool: "true or false",
    bytes: "bytes",
    int: "an integer",
    float: "a number",
    str: "text",
    Decimal: "a decimal number",
    type(None): "null",
    datetime: "a time in ISO 8601",
    date: "a date in ISO 8601",
    time: "a time of day in ISO 8601",
    UUID: "a UUID",
}


class MisfitError(ValueError):
    """A payload does not match the handler's type; the message is a sentence about the member."""

    def __init__(self, path: str, says: str) -> None:
        super().__init__(f"{path or 'the payload'} {says}")
        self.path = path


def converter(kind: Any) -> Callable[[Any], Any]:
    """Return what makes a payload of this type, or raises `MisfitError`.

    Raises:
        SetupError: there is no way to make one.
    """
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    # Within JSON there are none.
    others = tuple(each for each in kinds if each is not bytes)
    convert = _convert(typing.Union[others], {}) if others else _plain(bytes)  # noqa: UP007 - at run time
    takes_bytes = any(each in (bytes, Any, object) for each in kinds)
    name = _name(kind)

    def converted(payload: Any) -> Any:
        try:
            if isinstance(payload, bytes):
                _require(takes_bytes, "", "is bytes, not JSON")
                return payload
            return convert(payload, "")
        except MisfitError as error:
            error.args = (f"its payload is not a valid {name}: {error}",)
            raise

    return converted


def _convert(kind: Any, known: dict[Any, Convert]) -> Convert:
    kind = getattr(kind, "__supertype__", kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return lambda value, path: value
    if kind in (bool, int, float, str, Decimal, type(None)):
        return _plain(kind)
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (typing.Union, types.UnionType):
        names = " or ".join(_NAMES.get(each, _name(each)) for each in arguments)
        return _one_of([_convert(each, known) for each in arguments], names)
    if (origin or kind) in (dict, collections.abc.Mapping):
        return _mapping(_convert(arguments[1] if arguments else Any, known))
    if (origin or kind) in _LISTS and (origin is not tuple or arguments[1:] == (...,)):
        return _list(_LISTS[origin or kind], _convert(arguments[0] if arguments else Any, known))
    if kind in _FROM_TEXT:
        return _text(kind)
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _enum(kind)
        if (by_pydantic := _pydantic(kind)) is not None:
            return by_pydantic
        if dataclasses.is_dataclass(kind):
            return _dataclass(kind, known)
    raise SetupError(
        f"a payload cannot be read as {_name(kind)}: annotate a dataclass, a model of pydantic 2, or dict"
    )


def _pydantic(kind: type) -> Convert | None:
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is None or not (
        issubclass(kind, pydantic.BaseModel) or hasattr(kind, "__pydantic_validator__")
    ):
        return None
    if not hasattr(pydantic, "TypeAdapter"):
        raise SetupError(f"{kind.__name__} is a model of pydantic 1: pydantic 2 is needed")
    adapter = pydantic.TypeAdapter(kind)

    def convert(value: Any, path: str) -> Any:
        # As JSON: a strict model takes text for a time there.
        text = json.dumps(value)
        try:
            try:
                return adapter.validate_json(text)
            except pydantic.ValidationError as error:
                found = error.errors(include_url=False, include_context=False, include_input=False)
                if not any(_is_erased(value, each["loc"]) for each in found):
                    raise
                return adapter.validate_json(json.dumps(_with_nulls(value, [each["loc"] for each in found])))
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            first, *others = [(_joined(path, each["loc"]), each["msg"]) for each in found[:_MOST_ERRORS]]
            more = "".join(f"; {at or 'the payload'}: {says}" for at, says in others)
            raise MisfitError(first[0], f"is rejected: {first[1]}{more}") from None

    return convert


def _is_erased(value: Any, location: Sequence[int | str]) -> bool:
    """Return whether an error is about an erased member; a step of a union is in no payload."""
    try:
        for step in location:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return False
    return value is ERASED


def _with_nulls(value: Any, locations: Sequence[Sequence[int | str]]) -> Any:
    """Return a copy with null in place of the erased members at these places."""
    copied = json.loads(json.dumps(value))
    for location in locations:
        if location and _is_erased(value, location):
            *outer, last = location
            container = copied
            for step in outer:
                container = container[step]
            container[last] = None
    return copied


def _dataclass(kind: Any, known: dict[Any, Convert]) -> Convert:
    if kind in known:
        return known[kind]
    fields: list[tuple[str, bool, Convert]] = []

    def convert(value: Any, path: str) -> Any:
        _require(isinstance(value, dict), path, "is not an object")
        given = {}
        for name, is_required, convert_field in fields:
            there = f"{path}.{name}" if path else name
            if name in value:
                member = value[name]
                given[name] = member if member is ERASED else convert_field(member, there)
            elif is_required:
                raise MisfitError(there, "is missing")
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            raise MisfitError(path, f"is rejected: {error}") from None

    # Before its fields: one may be of the same class.
    known[kind] = convert
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise SetupError(f"{kind.__name__} has a field of an unknown type: {error}") from None
    for field in dataclasses.fields(kind):
        if field.init:
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            fields.append((field.name, not has_default, _convert(hints[field.name], known)))
    return convert


def _plain(kind: Any) -> Convert:
    takes: Any = {float: int | float, Decimal: int | float | str}.get(kind, kind)

    def convert(value: Any, path: str) -> Any:
        is_other = isinstance(value, bool) and kind is not bool
        _require(isinstance(value, takes) and not is_other, path, f"is not {_NAMES[kind]}")
        try:
            return Decimal(str(value)) if kind is Decimal else float(value) if kind is float else value
        except (InvalidOperation, OverflowError):
            raise MisfitError(path, f"is not {_NAMES[kind]}") from None

    return convert


def _text(kind: Any) -> Convert:
    def convert(value: Any, path: str) -> Any:
        _require(isinstance(value, str), path, f"is not {_NAMES[kind]}")
        try:
            return _FROM_TEXT[kind](value)
        except ValueError:
            raise MisfitError(path, f"is not {_NAMES[kind]}") from None

    return convert


def _enum(kind: type[Enum]) -> Convert:
    def convert(value: Any, path: str) -> Any:
        try:
            return kind(value)
        except (ValueError, TypeError):
            raise MisfitError(path, f"is not a value of {kind.__name__}") from None

    return convert


def _literal(allowed: tuple[Any, ...]) -> Convert:
    def convert(value: Any, path: str) -> Any:
        is_one = any(type(value) is type(each) and value == each for each in allowed)
        _require(is_one, path, f"is none of {', '.join(map(repr, allowed))}")
        return value

    return convert


def _one_of(ways: list[Convert], name: str) -> Convert:
    def convert(value: Any, path: str) -> Any:
        errors = []
        for way in ways:
            try:
                return way(value, path)
            except MisfitError as error:
                errors.append(error)
        # One about a member says most: `lines[2].price is missing`, where another is `lines is not null`.
        inside = [each for each in errors if each.path != path]
        raise inside[0] if inside else MisfitError(path, f"is not {name}")

    return convert


def _mapping(convert_value: Convert) -> Convert:
    def convert(value: Any, path: str) -> Any:
        _require(isinstance(value, dict), path, "is not an object")
        return {key: convert_value(each, f"{path}.{key}" if path else key) for key, each in value.items()}

    return convert


def _list(make: Callable[[list[Any]], Any], convert_item: Convert) -> Convert:
    def convert(value: Any, path: str) -> Any:
        _require(isinstance(value, list), path, "is not a list")
        items = [convert_item(each, f"{path}[{n}]") for n, each in enumerate(value)]
        try:
            return make(items)
        except TypeError as error:
            raise MisfitError(path, f"is rejected: {error}") from None

    return convert


def _require(fits: bool, path: str, otherwise: str) -> None:
    if not fits:
        raise MisfitError(path, otherwise)


def _joined(path: str, location: tuple[int | str, ...]) -> str:
    """As `lines[2].price`."""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _name(kind: Any) -> str:
    return "None" if kind is type(None) else kind.__name__ if isinstance(kind, type) else str(kind)
