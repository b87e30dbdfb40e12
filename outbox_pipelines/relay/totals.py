"""The totals of a relay, for the line that it prints at its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """The totals of a worker."""

    events: int = 0
    unpublished: int = 0
    """After a run until empty: events of the table that are parked or dead letters."""
    seconds: float = 0.0
    paused: int = 0
    """How many of `unpublished` wait for their next attempt because a relay crashed while it tried them."""
    paused_seconds: float = 0.0
    """Minimum seconds until the first of these is due."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.events + other.events,
            self.unpublished + other.unpublished,
            self.seconds + other.seconds,
            self.paused + other.paused,
            max(self.paused_seconds, other.paused_seconds),
        )
