"""What travels through the relay: an event, and batches of them.

Invariants:
- All are immutable; every part of the relay shares them, none adds to them.
- The events of a batch are in `seq` order, and publishing all of them justifies its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import Final, NamedTuple

from outbox_pipelines.position import Position, Snapshot


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


def weigh(events: Iterable[Event]) -> int:
    """Return how many bytes of memory the text of events takes, all columns together, or a few more.

    One character beyond Latin makes Python store the whole text in two or four bytes a character, so that the
    number of characters would say too little.
    """
    columns = list(zip(*events, strict=True))
    if not columns:
        return 0
    _, _, aggregate_types, aggregate_ids, event_types, payloads, metadata = columns
    return (
        getsizeof("".join(aggregate_types))
        + getsizeof("".join(aggregate_ids))
        + getsizeof("".join(event_types))
        + getsizeof("".join(payloads))
        + getsizeof("".join(filter(None, metadata)))
    )


LARGE: Final = 16_000_000
"""Bytes in memory from which events are read, published and settled before the next such is read."""


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
    """By seq: events whose content was not read because a relay died at them. They are parked."""

    @property
    def position(self) -> Position:
        """How far the shard is when all of them are published."""
        if self.ends_tick:
            return Position(self.target)
        return Position(self.done, self.target, self.events[-1].seq)

    def cut(self, events: int) -> tuple[Batch, Batch | None]:
        """The first so many events as a batch of their own, and the rest if there is one."""
        if len(self.events) <= events:
            return self, None
        first, rest = self.events[:events], self.events[events:]
        return (
            replace(self, events=first, size=weigh(first), ends_tick=False),
            replace(self, events=rest, size=weigh(rest), starts_tick=False),
        )

    @property
    def is_large(self) -> bool:
        """Whether it is published and settled before anything else is read, for the sake of memory."""
        return self.size > LARGE

    @property
    def is_whole(self) -> bool:
        """Whether it is a tick."""
        return self.starts_tick and self.ends_tick

    def followed_by(self, batch: Batch) -> Batch:
        """Two ticks as one: what the second's target sees, and the first's `done` did not."""
        assert self.is_whole
        assert batch.is_whole
        events = sorted(self.events + batch.events)
        return Batch(
            events,
            self.size + batch.size,
            self.done,
            batch.target,
            ends_tick=True,
            unreadable={**self.unreadable, **batch.unreadable},
            suspects={**self.suspects, **batch.suspects},
        )


@dataclass(frozen=True, slots=True)
class Released:
    """Parked events whose way is free, in `seq` order: published without moving a position."""

    events: list[Event]
    size: int
    """Bytes of text in them, as `weigh` counts."""
