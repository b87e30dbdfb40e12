"""What travels through the relay: an event, and pieces of them.

Invariants:
- All are immutable; every part of the relay shares them, none adds to them.
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
    starts_tick: bool = True

    @property
    def position(self) -> Position:
        """How far the shard is when all of them are published."""
        if self.ends_tick:
            return Position(self.target)
        return Position(self.done, self.target, self.events[-1].seq)

    def cut(self, events: int) -> tuple[Piece, Piece | None]:
        """The first so many events as a piece of their own, and the rest if there is one."""
        if len(self.events) <= events:
            return self, None
        first, rest = self.events[:events], self.events[events:]
        size = sum(len(event.payload) for event in first)
        return (
            Piece(first, size, self.done, self.target, ends_tick=False, starts_tick=self.starts_tick),
            Piece(rest, self.size - size, self.done, self.target, self.ends_tick, starts_tick=False),
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is a tick."""
        return self.starts_tick and self.ends_tick

    def followed_by(self, piece: Piece) -> Piece:
        """Two ticks as one: what the second's target sees, and the first's `done` did not."""
        assert self.is_whole
        assert piece.is_whole
        events = sorted(self.events + piece.events)
        return Piece(events, self.size + piece.size, self.done, piece.target, ends_tick=True)


@dataclass(frozen=True, slots=True)
class Released:
    """Parked events whose way is free, in `seq` order: published without moving a position."""

    events: list[Event]
    size: int
    """Characters of payload in them."""
