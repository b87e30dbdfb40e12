"""Batches of events that are published together, and their queue from the reader to the publisher.

Invariants:
- Both kinds are immutable: every part of the relay shares them, and none changes them.
- The events of a batch are in the order of `seq`, or in the order of commits: then a tick in several batches
  is one transaction. Publishing all of them justifies the position of the batch.
- At most two batches wait. The reader waits with a third, so that a slow Kafka does not fill the memory.
  Claims, which are few, do not wait: `BatchQueue.add`.
- Small ticks in the queue are joined: a publisher that was busy gets everything read since then at once, and
  no event waits for a second transaction.
- Each call of the queue is atomic: see `relay.shared`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from outbox_pipelines.core.event import LARGE, Event, weigh
from outbox_pipelines.core.position import Position, Snapshot

_MOST: Final = 2
# Limits of a batch that may be joined with others.
_SMALL_EVENTS: Final = 1000
_SMALL_SIZE: Final = 1_000_000


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
    """By seq: events whose content was not read because they crashed a relay. They are parked."""
    in_commit_order: bool = False
    """Whether they are in the order of commits."""

    @property
    def position(self) -> Position:
        """The position of the shard when all of them are published."""
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


class BatchQueue:
    """A queue for one reader and one publisher; None marks the end of all batches."""

    def __init__(self) -> None:
        self._waiting: deque[Batch | None] = deque()

    def takes(self, batch: Batch | None) -> bool:
        """Return whether there is room for this batch."""
        return len(self._waiting) < _MOST or self._joins(batch)

    def add(self, batch: Batch | None) -> None:
        """Add a batch, for which there must be room."""
        if self._joins(batch):
            last = self._waiting[-1]
            assert last is not None
            assert batch is not None
            self._waiting[-1] = last.followed_by(batch)
        else:
            self._waiting.append(batch)

    def has(self, wanted: Callable[[Batch], bool]) -> bool:
        """Return whether the first batch is wanted or the end. Otherwise others may still join it."""
        return bool(self._waiting) and (self._waiting[0] is None or wanted(self._waiting[0]))

    def pop(self) -> Batch | None:
        """Remove and return the first batch."""
        return self._waiting.popleft()

    def get(self, seconds: float, wanted: Callable[[Batch], bool]) -> Batch | None:
        """Remove and return the first batch as soon as it is wanted.

        Raises:
            LookupError: there was none within `seconds`.
        """
        if not self.has(wanted):
            raise LookupError
        return self.pop()

    def want(self) -> None:
        """Say that a batch can be taken soon; until then, one that is read now would only wait."""

    def _joins(self, batch: Batch | None) -> bool:
        last = self._waiting[-1] if self._waiting else None
        return batch is not None and last is not None and _is_small(last) and _is_small(batch)


def _is_small(batch: Batch) -> bool:
    return batch.is_whole and len(batch.events) < _SMALL_EVENTS and batch.size < _SMALL_SIZE
