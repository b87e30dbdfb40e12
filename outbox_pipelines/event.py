"""What travels through the relay: an event, and a piece of a tick.

Invariants:
- Both are immutable; every part of the relay shares them, none adds to them.
- The events of a piece are in `seq` order, and publishing all of them justifies its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outbox_pipelines.relay.position import Position, Snapshot


class Event(NamedTuple):
    """One row of the outbox, as the relay reads it. A tuple, because a drain makes 200,000 a second."""

    seq: int
    id: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str
    """The body, JSON as PostgreSQL prints it."""
    metadata: str | None
    """A JSON object of the other columns that are not null; None, as for most events, when all are. Under
    `created-at` the event's time, where the source was told to read it."""

    def __str__(self) -> str:
        aggregate = f"{self.aggregate_type} {self.aggregate_id}"
        return f"event {self.id} (seq {self.seq}, {self.event_type} of {aggregate})"


@dataclass(frozen=True, slots=True)
class Piece:
    """Events of one tick that are published together."""

    events: list[Event]
    size: int
    """Characters of payload in them."""
    done: Snapshot
    target: Snapshot
    ends_tick: bool

    @property
    def position(self) -> Position:
        """How far the shard is when all of them are published."""
        return Position(self.target) if self.ends_tick else self.before(self.events[-1].seq + 1)

    def before(self, seq: int) -> Position:
        """How far the shard is when only those below `seq` are published."""
        return Position(self.done, self.target, seq - 1)
