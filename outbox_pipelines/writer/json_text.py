"""Convert Python values to JSON text that PostgreSQL's jsonb accepts.

Invariants:
- Strict JSON: no NaN, no NUL, no half of a surrogate pair; nothing is omitted or guessed.
- The same value gives the same text in every process, sets included.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import Any, Final
from uuid import UUID

from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.names import is_missing


def to_json(what: str, value: object, encode: Callable[[object], str] | None = None) -> str:
    """Return the JSON text of a value, spaced as PostgreSQL prints jsonb; `what` names it in the message.

    Raises:
        OutboxError: the value has no JSON form, or jsonb does not accept it.
    """
    try:
        text = (encode or _ENCODE)(value)
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise OutboxError(f"{what} has half of a surrogate pair, which is not text: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        where, part = _culprit(what, value, encode or _ENCODE)
        if _is_whole(part):
            raise OutboxError(
                f"{where} is a {type(part).__name__}, which must be the whole payload: pass it alone, the "
                "rest as headers or in an event of its own"
            ) from error
        raise OutboxError(f"{where} does not serialize to JSON: {error}") from error
    # The first check is cheap, but also matches an escaped backslash before "u0000".
    if "\\u0000" in text and _NUL.search(text):
        raise OutboxError(f"{what} has a NUL character (\\u0000), which PostgreSQL does not store: remove it")
    return text


def jsonable(value: Any) -> object:
    """Convert a value that the `json` module does not support, one level deep."""
    if isinstance(value, Enum):
        return value.value
    if is_missing(value):
        raise ValueError(f"{value} is a missing value: omit it, or send null")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return _duration(value)
    if isinstance(value, UUID):
        return str(value)
    # Here and below: if the value exists, its module is loaded.
    if (decimal := sys.modules.get("decimal")) and isinstance(value, decimal.Decimal):
        return _decimal(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=_ENCODE)
    if not isinstance(value, type):
        if hasattr(value, "model_dump"):
            return value.model_dump(mode="json")
        if hasattr(value, "__dataclass_fields__"):
            fields: Any = sys.modules["dataclasses"].fields(value)
            return {field.name: getattr(value, field.name) for field in fields}
        if hasattr(value, "__attrs_attrs__"):
            return {field.name: getattr(value, field.name) for field in value.__attrs_attrs__}
    kind = type(value).__qualname__
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(
            f"{kind} have no JSON form: decode them, or send base64 text; a payload can be a BytesPayload"
        )
    if hasattr(value, "__next__"):
        raise TypeError(f"a {kind} can be read only once: convert it to a list")
    raise TypeError(f"a {kind} has no JSON form: pass its members, or its text")


def _is_whole(value: object) -> bool:
    """Return whether a value is a `BytesPayload` or a `LargePayload`, which give their text themselves."""
    return isinstance(value, tuple) and callable(getattr(type(value), "text", None))


def _culprit(where: str, value: object, encode: Callable[[object], str]) -> tuple[str, object]:
    """Return the path of the innermost part that has no JSON form, as ``payload.lines[2].price``, and it."""
    for _ in range(_DEEPEST):
        if _is_whole(value):
            return where, value
        try:
            plain = value if isinstance(value, dict | list | tuple) else jsonable(value)
        except (TypeError, ValueError):
            return where, value
        if isinstance(plain, dict):
            members = [(_step(key), one) for key, one in plain.items()]
        elif isinstance(plain, list | tuple):
            members = [(f"[{number}]", one) for number, one in enumerate(plain)]
        else:
            return where, value
        for step, member in members:
            if not _encodes(member, encode):
                where, value = where + step, member
                break
        else:
            # The cause is a key, or a circular reference.
            return where, value
    return where, value


def _step(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _encodes(value: object, encode: Callable[[object], str]) -> bool:
    try:
        encode(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _decimal(value: Any) -> str:
    if not value.is_finite():
        raise ValueError(f"{value} is not a JSON number: omit it, or send null")
    return str(value)


def _duration(value: timedelta) -> str:
    """Return a duration in ISO 8601, in exact seconds: ``PT90S``, ``-PT0.5S``."""
    microseconds = value // timedelta(microseconds=1)
    seconds, rest = divmod(abs(microseconds), 1_000_000)
    fraction = f".{rest:06}".rstrip("0") if rest else ""
    return f"{'-' if microseconds < 0 else ''}PT{seconds}{fraction}S"


_ENCODE: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=jsonable).encode
# A longer path is not useful; a value that contains itself has no end.
_DEEPEST: Final = 20
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
