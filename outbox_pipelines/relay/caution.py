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

import threading
from typing import Final

from outbox_pipelines.database import Connection
from outbox_pipelines.event import Piece
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.parking import DIED
from outbox_pipelines.relay.position import Snapshot
from outbox_pipelines.relay.shards import Shard

# More than can be on its way: 30,000 events, the next piece, and what waits for the settler.
_WINDOW: Final = 150_000
_FEW: Final = 100
# Twice what one death leaves in doubt.
_SINGLES: Final = 200


class Caution:
    """How much to read and publish at once, and which event not at all.

    The reading thread asks and marks; the publishing thread says what is settled.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._left = _WINDOW
        self._singles = _SINGLES if shard.deaths > 1 else 0
        self._until: Snapshot | None = None
        self._connection: Connection | None = None
        self._has_passed = threading.Event()
        self.is_needed = shard.deaths > 0
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
        if seq == self._shard.suspect and self._shard.suspect_deaths:
            return DIED
        self._write(seq)
        return None

    def waits(self) -> None:
        """The event is with Kafka's client and has not killed the process: it is innocent, whatever comes."""
        if self._singles:
            self._write(None)

    def passed(self, piece: Piece) -> None:
        """A piece is settled: the next may be read."""
        if self.is_needed:
            self._count(piece)
        self._has_passed.set()

    def _count(self, piece: Piece) -> None:
        self._left -= len(piece.events)
        self._singles = max(0, self._singles - len(piece.events))
        caught_up = piece.ends_tick and self._until is not None and piece.target.xmax >= self._until.xmax
        if self._left <= 0 or caught_up:
            self.is_needed, self.is_over = False, True

    def wait_until_passed(self, seconds: float) -> bool:
        """Wait for the piece that was read last; return whether it is settled."""
        if not self._has_passed.wait(seconds):
            return False
        self._has_passed.clear()
        return True

    def close(self) -> None:
        """Closes the connection, if there was a need for one."""
        if self._connection is not None:
            self._connection.close()

    def _write(self, seq: int | None) -> None:
        if self._connection is None:
            self._connection = self._shard.connect("caution")
        self._connection.execute(queries.SUSPECT, {**self._shard.key, "seq": seq})
