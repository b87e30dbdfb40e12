"""How large a transaction of `exactly_once` may be: what Kafka acknowledges in good time.

Invariants:
- A slow transaction makes the next one smaller; fast ones make it larger. One event always has room.
"""

from __future__ import annotations

from typing import Final

MOST_EVENTS: Final = 40_000
MOST_BYTES: Final = 24_000_000
# As shares of those. A new relay begins small: one that Kafka cannot finish in time was for nothing.
_FIRST: Final = 1 / 64
_LEAST: Final = 1 / 256
# As shares of the timeout: above the first, the next one is smaller; below the second, it may be larger. Not
# less: where each transaction takes half a second however small it is, small ones would stay small.
_SLOW: Final = 0.4
_FAST: Final = 0.2


class TransactionSize:
    """The size of the next transaction, from the duration of those before.

    Args:
        timeout: seconds that a transaction may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
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
        """Adapt the size to the duration of a transaction."""
        used = _share(events, size)
        if seconds > _SLOW * self._timeout:
            self._share = max(_LEAST, min(self._share, used * _FAST * self._timeout / seconds))
        elif seconds < _FAST * self._timeout and used >= self._share / 2:
            self._share = min(1.0, 2 * self._share)


def _share(events: int, size: int) -> float:
    return max(events / MOST_EVENTS, size / MOST_BYTES)
