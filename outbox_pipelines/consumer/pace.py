"""How many events share a transaction: as many as their handlers finish in about a tenth of a second.

Invariants:
- A shared transaction keeps its locks no longer than a few times that, whatever the handlers do.
"""

from __future__ import annotations

from typing import Final

_FIRST: Final = 8
_MOST: Final = 10_000
SECONDS: Final = 0.1


class Pace:
    """The current number; it follows the time that the last transactions took."""

    def __init__(self) -> None:
        self.events = _FIRST

    def took(self, events: int, seconds: float) -> None:
        """Learn from a transaction."""
        if seconds > SECONDS:
            self.events = max(1, self.events // 2)
        elif seconds < SECONDS / 2 and events >= self.events:
            self.events = min(2 * self.events, _MOST)

    def too_long(self, events: int) -> None:
        """Learn from a transaction that was given up behind so many events."""
        self.events = max(1, min(events, self.events) // 2)
