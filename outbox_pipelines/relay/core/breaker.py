"""A circuit breaker: while Kafka accepts nothing, no events are sent, and one probe at a time checks it.

Invariants:
- Pure: its inputs are the time and what happened; its output is what may be done. No attempt is counted.
- closed → open if nothing was acknowledged for `patience`; open → half-open if a probe is answered;
  half-open → closed at the first acknowledgment; without one, open again, and longer.
- Half-open takes one batch more: it can go to a topic that is better off than what is in flight.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0


class State(Enum):
    """What may be sent to Kafka: everything, nothing, or what is in flight and one batch."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The circuit breaker between one relay and Kafka.

    Args:
        patience: seconds without an acknowledgment, with events in flight, until it opens.
    """

    def __init__(self, patience: float) -> None:
        self.state = State.CLOSED
        self.reason: str | None = None
        self._patience = patience
        self._pause = _FIRST_PAUSE
        self._quiet_since: float | None = None
        self._probe_at = 0.0
        self._takes_one = False

    @property
    def takes(self) -> bool:
        """Whether a new batch may be sent."""
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and self._takes_one)

    def took(self) -> None:
        """Record that a new batch is sent."""
        self._takes_one = False

    def idle(self) -> None:
        """Reset the patience: nothing is in flight."""
        self._quiet_since = None

    def acknowledged(self) -> None:
        """Close: Kafka has accepted a message, or refused it because of its content."""
        self.state, self.reason = State.CLOSED, None
        self._pause, self._quiet_since = _FIRST_PAUSE, None

    def quiet(self, now: float, reason: str) -> None:
        """Record that events are in flight and nothing was acknowledged since the last call."""
        if self._quiet_since is None:
            self._quiet_since = now
        elif self.state is not State.OPEN and now - self._quiet_since >= self._patience:
            self.trip(now, reason)

    def trip(self, now: float, reason: str) -> None:
        """Open immediately."""
        if self.state is State.HALF_OPEN:
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        self.state, self.reason = State.OPEN, reason
        self._quiet_since, self._probe_at = None, now + self._pause

    def wants_probe(self, now: float) -> bool:
        """Return whether it is time to probe Kafka."""
        return self.state is State.OPEN and now >= self._probe_at

    def probed(self, now: float, answered: bool) -> None:
        """Record the result of a probe."""
        if answered:
            self.state, self._quiet_since, self._takes_one = State.HALF_OPEN, None, True
        else:
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            self._probe_at = now + self._pause
