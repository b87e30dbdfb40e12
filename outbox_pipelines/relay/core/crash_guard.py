"""How a relay goes on where others have died: an event may be what kills the process.

Invariants:
- Needed only after an unclean death, and only over what may have been on its way then: an ordinary event
  never costs a commit of its own.
- After the first death: a hundred events at a time. After the next: one at a time, each marked in the
  database before its content is read: reading it may be what kills. An event that was marked at a death is
  parked: `Retries` tries it alone, after a pause, while all others go on, and knows when it is a dead letter.
- While it is needed, and behind a large batch, nothing is read before all that was read is settled.
- The mark is taken away from an event that Kafka merely does not answer for: an outage blames nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from outbox_pipelines.position import Snapshot
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.blocked import CRASHED

# More than can be on its way: 30,000 events, the next batch, and what waits for the settler.
_WINDOW: Final = 150_000
_FEW: Final = 100
# Twice what one death leaves in doubt.
_SINGLES: Final = 200


class CrashGuard:
    """How much to read and publish at once, and which event not at all.

    The reading thread asks and marks; the publishing thread says what is settled.

    Args:
        crashes: how many relays of the shard have died in a row.
        suspect: the seq at which the last one died, if it knew, and how many have in a row.
        mark: writes down which event is about to be read; None: nobody is to blame if the relay dies.
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
        """Set when the danger is past, for the settler to write down."""

    def until(self, now: Snapshot) -> None:
        """What had committed when the relay started: nothing later was on its way."""
        self._until = now

    def step(self) -> int | None:
        """Return how many events may be read at once; None: any number."""
        if not self.is_needed:
            return None
        return 1 if self._singles else _FEW

    def before(self, seq: int) -> str | None:
        """Mark an event that is about to be read alone; return why it must not be, if a relay died of it."""
        suspect, crashes = self._suspect
        if seq == suspect and crashes:
            return CRASHED
        self._mark(seq)
        return None

    def waits(self) -> None:
        """The event is with Kafka's client and has not killed the process: it is innocent, whatever comes."""
        if self._singles:
            self._mark(None)

    def passed(self, batch: Batch) -> None:
        """A batch is settled: the next may be read."""
        if self.is_needed:
            self._count(batch)
        self._on_passed()

    def _count(self, batch: Batch) -> None:
        self._left -= len(batch.events)
        self._singles = max(0, self._singles - len(batch.events))
        caught_up = batch.ends_tick and self._until is not None and batch.target.xmax >= self._until.xmax
        if self._left <= 0 or caught_up:
            self.is_needed, self.is_over = False, True
