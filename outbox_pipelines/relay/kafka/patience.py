"""How long the flow of all events may wait for topics in creation.

Invariants:
- At once it is half a second at most, and over time a twentieth: missing topics do not slow down the others.
- Time that was not spent is saved up to that half second only.
"""

from __future__ import annotations

import time
from typing import Final

_MOST_SECONDS: Final = 0.5
_SHARE: Final = 0.05


class Patience:
    """A budget of waiting time that refills; use it from one thread at a time."""

    def __init__(self) -> None:
        self._left = _MOST_SECONDS
        self._at = time.monotonic()

    def left(self) -> float:
        """Return how long the flow may wait now, in seconds."""
        now = time.monotonic()
        self._left = min(_MOST_SECONDS, self._left + (now - self._at) * _SHARE)
        self._at = now
        return max(0.0, self._left)

    def spend(self, seconds: float) -> None:
        """Take this time from what is left."""
        self._left -= seconds
