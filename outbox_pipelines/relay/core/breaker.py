"""A circuit breaker: while Kafka takes nothing, nothing more is handed to it, and one probe at a time asks.

Invariants:
- Pure: told the time and what happened, it says what may be done. Nothing is counted against any event.
- closed → open when nothing was acknowledged for `patience`; open → half-open when a probe is answered;
  half-open → closed at the first acknowledgement, or open again, and longer, without one.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0


class State(Enum):
    """What may be handed to Kafka: everything, nothing, or just what is on its way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The state of one relay's way to Kafka.

    Args:
        patience: seconds without any acknowledgement, with events on their way, until it opens.
    """

    def __init__(self, patience: float) -> None:
        self.state = State.CLOSED
        self.reason: str | None = None
        self._patience = patience
        self._pause = _FIRST_PAUSE
        self._quiet_since: float | None = None
        self._probe_at = 0.0

    def idle(self) -> None:
        """Nothing is on its way: there is nothing to be impatient about."""
        self._quiet_since = None

    def acknowledged(self) -> None:
        """Kafka has taken something, or has refused it for its content: it is available."""
        self.state, self.reason = State.CLOSED, None
        self._pause, self._quiet_since = _FIRST_PAUSE, None

    def quiet(self, now: float, reason: str) -> None:
        """Something is on its way, and nothing has come back since the last call."""
        if self._quiet_since is None:
            self._quiet_since = now
        elif self.state is not State.OPEN and now - self._quiet_since >= self._patience:
            self.trip(now, reason)

    def trip(self, now: float, reason: str) -> None:
        """Opens at once."""
        if self.state is State.HALF_OPEN:
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        self.state, self.reason = State.OPEN, reason
        self._quiet_since, self._probe_at = None, now + self._pause

    def wants_probe(self, now: float) -> bool:
        """Whether it is time to ask Kafka for a sign of life."""
        return self.state is State.OPEN and now >= self._probe_at

    def probed(self, now: float, answered: bool) -> None:
        """What the probe brought."""
        if answered:
            self.state, self._quiet_since = State.HALF_OPEN, None
        else:
            self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            self._probe_at = now + self._pause
