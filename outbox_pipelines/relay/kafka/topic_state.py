"""The known state of one topic: found, looked up, or refusing messages; how long to wait for it.

Invariants:
- At once the flow of all events waits for topics in creation for half a second at most, and over time for a
  twentieth: missing topics do not slow down the others. Time that was not spent is saved up to that half
  second only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that can be published to."""

    name: str
    partitions: int
    largest: int | None
    """Bytes of the largest batch that it accepts; None if the relay may not read the topic's settings."""


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """A change of a topic's number of partitions, which moves its keys."""

    topic: str
    before: int
    after: int


class TopicUnavailableError(Exception):
    """Nothing can be published to this topic now; other topics are not affected."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"topic {topic} {reason}")
        self.topic = topic
        self.reason = reason


@dataclass(slots=True)
class Search:
    """A topic that is not known to exist."""

    final_at: float
    due: float = 0.0
    reason: str = ""
    """Why it is unavailable; empty until a broker has answered."""
    is_final: bool = False
    create_at: float = 0.0
    """When the relay creates it, or gives the broker the opportunity to."""
    is_waited_for: bool = False
    """Whether the flow has waited for its creation once."""


@dataclass(slots=True)
class TopicRefusal:
    """A topic that exists and accepts no messages."""

    reason: str
    trial_at: float
    """When it is tried with a message; infinite if the brokers report when it accepts messages again."""


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
