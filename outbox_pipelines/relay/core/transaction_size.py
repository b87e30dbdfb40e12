"""How large a transaction may be: what Kafka acknowledges in good time.

Invariants:
- A slow transaction makes the next one smaller; fast ones make it larger.
- One event always has room.
"""

from __future__ import annotations

from typing import Final

MOST_EVENTS: Final = 40_000
MOST_BYTES: Final = 24_000_000
# As shares of those. A new relay begins small: one that Kafka cannot finish in time was for nothing.
_FIRST: Final = 1 / 64
_LEAST: Final = 1 / 256
# Above the first, the next one is smaller; below the second, it may be larger.
_SLOW_SECONDS: Final = 1.0
_FAST_SECONDS: Final = 0.5


class TransactionSize:
    """The limits of one transaction after the other."""

    def __init__(self) -> None:
        self._share = _FIRST

    @property
    def events(self) -> int:
        """How many events the next transaction may have."""
        return int(MOST_EVENTS * self._share)

    @property
    def bytes(self) -> int:
        """How many bytes of text they may have."""
        return int(MOST_BYTES * self._share)

    def is_full(self, events: int, size: int) -> bool:
        """Return whether a transaction must end."""
        return events >= self.events or size >= self.bytes

    def committed(self, events: int, size: int, seconds: float) -> None:
        """Learn from a transaction that took so long."""
        used = _share(events, size)
        if seconds > _SLOW_SECONDS:
            self._share = max(_LEAST, min(self._share, used * _FAST_SECONDS / seconds))
        elif seconds < _FAST_SECONDS and used >= self._share / 2:
            self._share = min(1.0, 2 * self._share)


def _share(events: int, size: int) -> float:
    return max(events / MOST_EVENTS, size / MOST_BYTES)
