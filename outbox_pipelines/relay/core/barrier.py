"""What a relay does while the number of shards changes: stand still, meet the others, end.

Invariants:
- It says that it stands still only when all that it has read is settled and nothing parked is under way, and
  then reads nothing but what the barrier asks for.
- It says that it has arrived only when all is read up to the barrier; the statement checks that this is
  settled.
- It goes to a barrier only if it stood still when that was set: else it may be past it, and would go back.
- When the new shards have begun it ends. If the change is given up it goes on where it stood.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from outbox_pipelines.position import Snapshot


class Step(Enum):
    """What is to be done next."""

    PREPARE = "make ready what the new shards need"
    READ_REST = "read on to the end of the tick at hand"
    PAUSE = "say that all is settled up to here"
    READ = "read up to the barrier"
    ARRIVE = "say that all is settled up to the barrier"
    WAIT = "look again soon"
    GO_ON = "read as before"
    END = "end: the new shards have begun"


class Change(Protocol):
    """A change as the database shows it."""

    is_wanted: bool
    is_over: bool
    """Whether the new shards have begun."""
    barrier_paused: bool
    """Whether this relay has said that it stands still."""
    barrier_reached: bool
    """Whether it has said that it has arrived."""
    barrier: Snapshot | None


class BarrierPause:
    """A stand-still: the reader wants it, the settler reaches it."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Nothing new is tried."""
        self.is_reached = False
        """Nothing is under way."""


class Barrier:
    """A relay's part in changes of the number of shards; for the thread that reads."""

    def __init__(self, pause: BarrierPause) -> None:
        self._pause = pause
        self._is_prepared = False
        self._has_read_all = False

    @property
    def is_taking_part(self) -> bool:
        """Whether the relay stands still, or is about to."""
        return self._is_prepared

    def step(self, change: Change) -> Step:
        """Return what is to be done, as of now."""
        if change.is_over:
            return Step.END
        if not change.is_wanted:
            self._is_prepared = self._has_read_all = False
            self._pause.is_wanted = self._pause.is_reached = False
            return Step.GO_ON
        if not self._is_prepared:
            return Step.PREPARE
        if not self._pause.is_wanted:
            return Step.READ_REST
        if change.barrier is None or not change.barrier_paused:
            self._has_read_all = False
            may_hold = change.barrier is None and not change.barrier_paused
            return Step.PAUSE if self._pause.is_reached and may_hold else Step.WAIT
        if not self._has_read_all:
            return Step.READ
        return Step.WAIT if change.barrier_reached else Step.ARRIVE

    def prepared(self, succeeded: bool) -> None:
        """The new shards can begin; without it no relay could, once there is no way back."""
        self._is_prepared = succeeded

    def read_rest(self) -> None:
        """The tick at hand has been read to its end."""
        self._pause.is_wanted = True

    def read_all(self) -> None:
        """All has been read up to the barrier."""
        self._has_read_all = True
