"""Check the names and the id of an event: that each is text, and is in its own argument.

Invariants:
- An id has a text of its own: never an address in memory, the fields of an object, or a missing value.
- Names are refused as exchanged only where another order of the same arguments fits and this one does not.
"""

from __future__ import annotations

import itertools
import re
from enum import Enum
from typing import Final
from uuid import UUID

from outbox_pipelines.writer.errors import OutboxError

_ORDER: Final = "the arguments are aggregate_type, aggregate_id, event_type, payload"
# What rows of SQLAlchemy and Django have, and SQLAlchemy's columns and expressions; their text is for people.
_OF_MODELS: Final = ("_sa_instance_state", "_meta", "__clause_element__", "compile")
_LIKE_AN_ID: Final = re.compile(r"\d+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


def as_text(column: str, value: object) -> str:
    """Return a value of text or a UUID as text; of an enumeration's member, the value."""
    if isinstance(value, Enum):
        # The value, not the name, which str() and drivers write.
        value = value.value
    if not isinstance(value, str | UUID):
        hint = f" ({_ORDER})" if column in ("aggregate_type", "event_type") else ""
        raise OutboxError(f"{column} is of type {type(value).__qualname__}: give text{hint}")
    return str(value)


def id_as_text(value: object) -> str:
    """Return the text of an id.

    Raises:
        OutboxError: it has no meaningful text.
    """
    if isinstance(value, Enum):
        value = value.value
    kind = type(value)
    if isinstance(value, str | UUID) or (isinstance(value, int) and not isinstance(value, bool)):
        try:
            return str(value)
        except ValueError as error:
            # Python converts no integer of more than 4,300 digits.
            raise OutboxError(
                "aggregate_id is an integer of thousands of digits: give a short one"
            ) from error
    if is_missing(value):
        raise OutboxError(f"aggregate_id is {value}, a missing value: give the id")
    # An id from a column with missing values is a float: 42.0.
    is_float = hasattr(kind, "is_integer") and not hasattr(kind, "__index__")
    is_truth = kind.__name__.startswith("bool")
    is_several = hasattr(kind, "__len__") or isinstance(value, memoryview)
    # That of `object` is an address or the fields; so is that of a model of pydantic.
    has_no_text = kind.__str__ is object.__str__ or _is_pydantics(kind.__str__)
    is_row = isinstance(value, type | BaseException) or any(hasattr(value, name) for name in _OF_MODELS)
    if is_float or is_truth or is_several or has_no_text or is_row:
        raise OutboxError(
            f"aggregate_id is of type {kind.__qualname__}: give text, an integer or a UUID; the text of this "
            f"type is no id ({_ORDER})"
        )
    return str(value)


def _is_pydantics(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("pydantic.")


def is_missing(value: object) -> bool:
    """Return whether a value is a NaN, or pandas' NaT or NA."""
    try:
        return bool(value != value)
    except (TypeError, ValueError, ArithmeticError):
        # A comparison with an NA is an NA, which is neither true nor false; one of arrays is an array.
        return type(value).__name__ == "NAType"


def refuse_exchanged(aggregate_type: str, aggregate_id: str, event_type: str) -> None:
    """Raise an `OutboxError` if the names fit in another order: such as `order.placed`, 42, `order`."""
    given = (aggregate_type, aggregate_id, event_type)
    if event_type.startswith(aggregate_type):
        return
    if not (_LIKE_AN_ID.fullmatch(aggregate_type) or _LIKE_AN_ID.fullmatch(event_type)) and not _fits(
        event_type, aggregate_id, aggregate_type
    ):
        return
    for order in itertools.permutations(given):
        if _fits(*order) and not _fits(*given):
            raise OutboxError(
                f"aggregate_type is {aggregate_type!r}, aggregate_id is {aggregate_id!r} and event_type is "
                f"{event_type!r}: they seem to be exchanged, {_ORDER}. Give them by name"
            )


def _fits(aggregate_type: str, aggregate_id: str, event_type: str) -> bool:
    """Return whether the event type is the aggregate type and a verb, and the id is a number or a UUID."""
    verb = event_type[len(aggregate_type) :]
    return (
        event_type.casefold().startswith(aggregate_type.casefold())
        and any(letter.isalpha() for letter in verb)
        and (verb[0].isupper() or not verb[0].isalnum())
        and _LIKE_AN_ID.fullmatch(aggregate_id) is not None
    )
