"""Texts that cannot be compressed: an index keeps each at its full length."""

from __future__ import annotations

import random
import string


def noise(length: int) -> str:
    """The same text for the same length."""
    return "".join(random.Random(length).choices(string.ascii_letters + string.digits, k=length))
