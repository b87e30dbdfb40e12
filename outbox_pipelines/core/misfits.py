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

TOO_DEEP: Final = "is nested too deeply"
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


parse: Final = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_constant).decode
