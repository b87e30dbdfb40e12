"""What stands for a value that was erased.

Invariants:
- It is a text: it has a JSON form, fits the schema of what it replaces, and survives being published again.
- It is false, and there is one: `if email:` and `email is ERASED` both tell.
"""

from __future__ import annotations

from typing import Final


class Erased(str):
    """The type of `ERASED`."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "ERASED"

    def __reduce__(self) -> str:
        # By its name: a copy is the same object.
        return "ERASED"


ERASED: Final = Erased("outbox-erased")
"""A value that was erased; false. As text and as JSON, it is ``outbox-erased``."""
