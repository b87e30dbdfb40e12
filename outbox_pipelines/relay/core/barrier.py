"""The steps of a relay while the number of shards changes: pause, reach the barrier, end.

Invariants:
- A relay reports the pause only when everything that it has read is settled and no parked event is in
  progress. After that it reads only up to the barrier.
- It reports the barrier as reached only when everything up to it is read; the statement checks that this is
  settled.
- It moves to a barrier only if it was paused when the barrier was set: otherwise it may be past it already.
- When the new shards have begun, it ends. If the change is abandoned, it continues where it paused.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from outbox_pipelines.core.position import Snapshot


class Step(Enum):
    """The next step."""

    PREPARE = "prepare what the new shards need"
    READ_REST = "read to the end of the current tick"
    PAUSE = "report that everything up to here is settled"
    READ = "read up to the barrier"
    ARRIVE = "report that everything up to the barrier is settled"
    WAIT = "check again soon"
    GO_ON = "read as before"
    END = "end: the new shards have begun"


class ShardChange(Protocol):
    """The state of a change of the number of shards, in the database."""

    is_wanted: bool
    """Whether a change is requested."""
    is_over: bool
    """Whether the new shards have begun."""
    barrier_paused: bool
    """Whether this relay has reported the pause."""
    barrier_reached: bool
    """Whether this relay has reported that it reached the barrier."""
    barrier: Snapshot | None


class BarrierPause:
    """A pause that the reader requests and the settler reaches."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether the pause is requested: nothing new is tried."""
        self.is_reached = False
        """Whether nothing is in progress."""


class Barrier:
    """A relay's part in changes of the number of shards; for the thread that reads."""

    def __init__(self, pause: BarrierPause) -> None:
        self._pause = pause
        self._is_prepared = False
        self._has_read_all = False

    @property
    def is_taking_part(self) -> bool:
        """Whether the relay is paused, or about to pause."""
        return self._is_prepared

    def step(self, change: ShardChange) -> Step:
        """Return the next step."""
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
            may_pause = change.barrier is None and not change.barrier_paused
            return Step.PAUSE if self._pause.is_reached and may_pause else Step.WAIT
        if not self._has_read_all:
            return Step.READ
        return Step.WAIT if change.barrier_reached else Step.ARRIVE

    def prepared(self, succeeded: bool) -> None:
        """Record whether the new shards are prepared: later the change cannot be cancelled."""
        self._is_prepared = succeeded

    def read_rest(self) -> None:
        """Record that the current tick has been read to its end."""
        self._pause.is_wanted = True

    def read_all(self) -> None:
        """Record that everything up to the barrier has been read."""
        self._has_read_all = True
