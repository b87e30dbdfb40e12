"""The crash guard of the relay: an event that crashes its process is found, and tried alone.

Invariants:
- It is needed only after a crash, and only for events that may have been in flight then: ordinary events
  never cost an additional commit.
- After the first crash, a hundred events are read at a time. After the next, one at a time; each is marked in
  the database before its content is read, because reading it may cause the crash. An event that was marked at
  a crash is parked: `Retries` tries it alone, after a pause, while all others continue, and makes it a dead
  letter after the last attempt.
- While it is needed, and after a large batch, nothing is read before everything that was read is settled.
- The mark is removed from an event that only waits for Kafka's answer: no event is the cause of an outage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.parked import CRASHED

HARMLESS_SECONDS: Final = 1.0
"""An event that crashes the process does so within this time, when it is encoded, compressed or sent."""
# More than can be in flight: 30,000 events, the next batch, and what waits for the settler.
_WINDOW: Final = 150_000
_FEW: Final = 100
# Twice what one crash leaves in doubt.
_SINGLES: Final = 200


class CrashGuard:
    """Decides how many events to read and publish at once, and which event to skip.

    The reading thread asks and marks; the publishing thread reports what is settled.

    Args:
        crashes: how many relays of the shard have crashed in a row.
        suspect: the seq at which the last relay crashed, if known, and the number of crashes there in a row.
        mark: records which event is read next; None: no event is the cause if the relay crashes.
        on_passed: called when the batch that was read last is settled.
    """

    def __init__(
        self,
        crashes: int,
        suspect: tuple[int | None, int],
        *,
        mark: Callable[[int | None], None],
        on_passed: Callable[[], None] = lambda: None,
    ) -> None:
        self._suspect = suspect
        self._mark = mark
        self._on_passed = on_passed
        self._left = _WINDOW
        self._singles = _SINGLES if crashes > 1 else 0
        self._until: Snapshot | None = None
        self.is_needed = crashes > 0
        self.is_over = False
        """Set when the guard is no longer needed, for the settler to record."""

    def until(self, now: Snapshot) -> None:
        """Set the snapshot of the relay's start: no later event was in flight at the crash."""
        self._until = now

    def step(self) -> int | None:
        """Return how many events may be read at once; None: any number."""
        if not self.is_needed:
            return None
        return 1 if self._singles else _FEW

    def before(self, seq: int) -> str | None:
        """Mark an event before it is read alone; return a reason if it must not be read (a crash)."""
        suspect, crashes = self._suspect
        if seq == suspect and crashes:
            return CRASHED
        self._mark(seq)
        return None

    def waits(self) -> None:
        """Clear the mark: the Kafka client has the event, and it has not crashed the process."""
        if self._singles:
            self._mark(None)

    def passed(self, batch: Batch) -> None:
        """Record that a batch is settled: the next may be read."""
        if self.is_needed:
            self._count(batch)
        self._on_passed()

    def _count(self, batch: Batch) -> None:
        self._left -= len(batch.events)
        self._singles = max(0, self._singles - len(batch.events))
        caught_up = batch.ends_tick and self._until is not None and batch.target.xmax >= self._until.xmax
        if self._left <= 0 or caught_up:
            self.is_needed, self.is_over = False, True
