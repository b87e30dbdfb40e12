"""How large a producer's batches may be: as its topics accept them.

Invariants:
- The client has one batch size for all topics: the lowest limit among the topics in use counts.
- A topic without events lately no longer counts: one with a low limit does not slow down others for good.
- A batch is never larger than one that Kafka has refused, until the topic's limit is known to have changed.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 1_000_000
LEAST: Final = 1_000
# A new producer waits until the old one has nothing in flight: not often, and not for a small gain.
_TURN_SECONDS: Final = 10.0
_WORTHWHILE: Final = 2


class BatchSize:
    """The batch size of one producer after another, in bytes.

    Attributes:
        current: of the producer that is in use.
        wanted: of the next one.
    """

    def __init__(self) -> None:
        self.current = self.wanted = MOST
        self._in_use: dict[str, int] = {}
        self._refused: dict[str, tuple[int | None, int]] = {}
        """By topic: its limit as it was known then, and what to try instead."""
        self._turn_at: float | None = None

    @property
    def must_shrink(self) -> bool:
        """Whether the current producer may send batches that a topic refuses."""
        return self.wanted < self.current

    @property
    def is_outdated(self) -> bool:
        """Whether another producer is wanted."""
        return self.wanted != self.current

    def use(self, topic: str, largest: int | None) -> None:
        """Count a topic that is about to be published to.

        Args:
            largest: bytes of the largest batch that it accepts; None if unknown.
        """
        limit = MOST if largest is None else min(MOST, largest)
        if (refused := self._refused.get(topic)) is not None:
            if refused[0] == largest:
                limit = min(limit, refused[1])
            else:
                del self._refused[topic]
        self._in_use[topic] = limit
        self.wanted = min(self.wanted, limit)

    def lower(self, topic: str, largest: int | None) -> bool:
        """Count a topic that has refused a batch; return whether smaller batches are possible.

        Args:
            largest: its limit as it is known now; if that does not explain the refusal, it is approached.
        """
        if largest is None or largest >= self.current:
            self._refused[topic] = largest, max(LEAST, self.current // 4)
        self.use(topic, largest)
        return self.must_shrink

    def turn(self, now: float) -> bool:
        """Return whether the topics in use are to be counted again, which may allow larger batches."""
        if self._turn_at is not None and now < self._turn_at:
            return False
        is_first, self._turn_at = self._turn_at is None, now + _TURN_SECONDS
        if is_first or not self._in_use:
            return False
        limit = min(self._in_use.values())
        if limit >= _WORTHWHILE * self.current:
            self.wanted = limit
        self._in_use = {}
        return True
