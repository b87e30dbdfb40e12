"""Batches of events that are published together: from a tick, or released parked events.

Invariants:
- Both kinds are immutable: every part of the relay shares them, and none changes them.
- The events of a batch are in the order of `seq`, or in the order of commits: then a tick in several batches
  is one transaction. Publishing all of them justifies the position of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outbox_pipelines.core.event import LARGE, Event, weigh
from outbox_pipelines.core.position import Position, Snapshot


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one tick that are published together."""

    events: list[Event]
    size: int
    """Bytes of text in them, as `weigh` counts."""
    done: Snapshot
    target: Snapshot
    ends_tick: bool
    starts_tick: bool = True
    unreadable: Mapping[int, str] = field(default_factory=dict)
    """By seq: events whose content was not read, and why. They become dead letters."""
    suspects: Mapping[int, str] = field(default_factory=dict)
    """By seq: events whose content was not read because a relay crashed at them. They are parked."""
    in_commit_order: bool = False
    """Whether they are in the order of commits."""

    @property
    def position(self) -> Position:
        """How far the shard is when all of them are published."""
        if self.ends_tick:
            return Position(self.target)
        return Position(self.done, self.target, self.events[-1].seq)

    def cut(self, events: int) -> tuple[Batch, Batch | None]:
        """Return the first `events` events as a batch, and the rest as another one, if any."""
        if len(self.events) <= events:
            return self, None
        first, rest = self.events[:events], self.events[events:]
        return (
            replace(self, events=first, size=weigh(first), ends_tick=False),
            replace(self, events=rest, size=weigh(rest), starts_tick=False),
        )

    @property
    def is_large(self) -> bool:
        """Whether it must be settled before anything else is read, to limit memory."""
        return self.size > LARGE

    @property
    def is_whole(self) -> bool:
        """Whether it is a complete tick."""
        return self.starts_tick and self.ends_tick

    def followed_by(self, batch: Batch) -> Batch:
        """Join two ticks into one: what the second's target sees and the first's `done` does not."""
        assert self.is_whole
        assert batch.is_whole
        in_commit_order = self.in_commit_order or batch.in_commit_order
        events = self.events + batch.events
        if not in_commit_order:
            events.sort()
        return Batch(
            events,
            self.size + batch.size,
            self.done,
            batch.target,
            ends_tick=True,
            unreadable={**self.unreadable, **batch.unreadable},
            suspects={**self.suspects, **batch.suspects},
            in_commit_order=in_commit_order,
        )


@dataclass(frozen=True, slots=True)
class ReleasedBatch:
    """Released parked events, in `seq` order: they are published without moving a position."""

    events: list[Event]
    size: int
    """Bytes of text in them, as `weigh` counts."""
