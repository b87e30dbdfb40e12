"""Which shards this process relays, of those that several processes could relay. No I/O.

Invariants:
- A free shard is taken by a process that owns less than its share; if none does, by any, after a moment.
- A process that owns more than its share passes shards on while another process is a standby, one at a time.
- Locks decide who owns a shard. A wrong estimate here costs a change of owner, nothing more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_high
from typing import Final, NamedTuple

SETTLE_SECONDS: Final = 1.0
"""After its start, a process waits for others that start at the same time."""
_PATIENCE: Final = 3.0
_RELEASE_EVERY: Final = 0.25
_KEEP_SECONDS: Final = 120.0


class Unit(NamedTuple):
    """What one relay relays: a shard of an outbox."""

    outbox: str
    shard: int


@dataclass(slots=True)
class _Seen:
    others: int = 0
    """Number of other processes that are standby for it, or own it."""
    free_since: float | None = None
    keep_until: float = 0.0


class Division:
    """The share of this process.

    Args:
        outboxes: how many there are.
        clock: seconds of a clock that never goes back.
    """

    def __init__(self, outboxes: int, clock: Callable[[], float]) -> None:
        self._outboxes = outboxes
        self._clock = clock
        self._take_from = clock() + SETTLE_SECONDS
        self._release_from = 0.0
        self._lock = threading.Lock()
        self._seen: dict[Unit, _Seen] = {}
        self._owned: set[Unit] = set()

    def saw(self, unit: Unit, *, others: int, is_free: bool) -> None:
        """Record the observed state of a shard.

        Args:
            others: number of other processes that are standby for it, or own it.
        """
        with self._lock:
            seen = self._seen.setdefault(unit, _Seen())
            seen.others = others
            if not is_free:
                seen.free_since = None
            elif seen.free_since is None:
                seen.free_since = self._clock()

    def lost_sight(self, outbox: str) -> None:
        """Forget an outbox that cannot be seen now."""
        with self._lock:
            for unit in [unit for unit in self._seen if unit.outbox == outbox and unit not in self._owned]:
                del self._seen[unit]

    def take(self, unit: Unit) -> bool:
        """Return whether this process is to take a free shard; it then counts as its own."""
        with self._lock:
            now = self._clock()
            if now < self._take_from or unit in self._owned:
                return False
            seen = self._seen.setdefault(unit, _Seen())
            waits = 0.0 if seen.free_since is None else now - seen.free_since
            if len(self._owned) >= self._share():
                if waits < _PATIENCE:
                    return False
                # The process that should take it has not.
                seen.keep_until = now + _KEEP_SECONDS
            self._owned.add(unit)
            return True

    def gave_back(self, unit: Unit) -> None:
        """Record that this process no longer relays the shard."""
        with self._lock:
            self._owned.discard(unit)
            self._seen.pop(unit, None)

    def must_pass_on(self, unit: Unit) -> bool:
        """Return whether this process is to pass the shard on; False for the next ones in a moment."""
        with self._lock:
            now = self._clock()
            seen = self._seen.get(unit)
            if unit not in self._owned or seen is None or not seen.others:
                return False
            if now < max(self._release_from, seen.keep_until):
                return False
            if len(self._owned) <= self._share():
                return False
            self._release_from = now + _RELEASE_EVERY
            # It is no longer counted: the next one is compared with what remains.
            self._owned.discard(unit)
            return True

    def _share(self) -> int:
        units = max(self._outboxes, len(self._seen.keys() | self._owned))
        return math.ceil(units / self._processes())

    def _processes(self) -> int:
        """Return how many processes divide the shards: what most shards show."""
        return 1 + median_high([seen.others for seen in self._seen.values()] or [0])
