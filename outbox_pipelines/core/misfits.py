"""Payloads as parsed JSON, and why one does not fit its schema.

Invariants:
- Numbers keep all digits: one with a point or an exponent is a Decimal.
- A `MisfitError` names the place and no content.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final

from outbox_pipelines.core.text import short

DEEPEST: Final = 100
"""How many levels of objects and arrays a payload of a recursive schema can have."""
TOO_DEEP: Final = f"is nested too deeply: at most {DEEPEST} levels of objects and arrays can be written"
# By the class of a parsed value; an integer is a number, too.
KINDS: Final = {
    **{type(None): "null", bool: "a boolean", str: "a string", list: "an array", dict: "an object"},
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
        self.place = short(step) + self.place
        return self

    def __str__(self) -> str:
        return f"payload{self.place} {self.args[0]}"


def misfit(value: Any, wanted: str) -> MisfitError:
    """Return the error of a value of another kind."""
    return MisfitError(f"is {KINDS[type(value)]} in place of {wanted}")


def exact_double(value: int | Decimal) -> float | None:
    """Return the double that is this number; None if no double has its digits."""
    try:
        found = float(value)
        if value == (int(found) if type(value) is int else Decimal(repr(found))):
            return found
    except OverflowError:
        pass
    return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) <= _MOST_DIGITS else Decimal(text)


_parse: Final = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant).decode
_parse_long: Final = json.JSONDecoder(
    parse_int=_integer, parse_float=Decimal, parse_constant=_no_constant
).decode
_MOST_DIGITS: Final = 1000


def parse(text: str) -> Any:
    """Return parsed JSON; raise `ValueError` if it is none.

    An integer of thousands of digits, which Python refuses, is a Decimal.
    """
    try:
        return _parse(text)
    except ValueError:
        return _parse_long(text)


def too_deep(payload: Any) -> MisfitError | None:
    """Return the error of a payload with more than `DEEPEST` levels; None for any other."""
    return None if _levels(payload) <= DEEPEST else deepest(payload, TOO_DEEP)


def deepest(payload: Any, why: str) -> MisfitError:
    """Return the error of a payload that is nested too deeply, at the member that has most levels."""
    error = MisfitError(why)
    if type(payload) is dict and payload:
        error.within(f".{max(payload, key=lambda name: _levels(payload[name]))}")
    return error


def _levels(value: Any) -> int:
    levels, within = 0, [value]
    while within := [each for each in within if type(each) in (dict, list)]:
        levels += 1
        within = [inner for each in within for inner in (each.values() if type(each) is dict else each)]
    return levels
