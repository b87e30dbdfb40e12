"""Sizes of a quick run (`QUICK=1`): its ratios are comparable, its figures are not."""

from __future__ import annotations

import os
from typing import Final, TypeVar

_Size = TypeVar("_Size")

QUICK: Final = os.environ.get("QUICK", "") not in ("", "0")


def sized(full: _Size, quick: _Size) -> _Size:
    """Return the size of this run; programs that a part starts have it from the environment as well."""
    return quick if QUICK else full
