"""Whether an outbox can have an event that has not been read: from its sequence, and without reading a table.

Invariants:
- An event takes its number (`seq`) before it commits, and a look sees the sequence before it sees the counter
  of transaction ids. So an event whose number was seen is of a transaction with an id below that counter:
  those that the reader's snapshot does not see are remembered, and the end of each is news.
- Anything it cannot judge is news: the cost is a look into the table, never an event.
- An INSERT that is the first statement of its transaction takes the number just before the transaction's id.
  If a look comes between the two, the event is found when the reader looks without news: see `watcher.py`.

A snapshot does not name all running transactions: its xmax follows the last one that ended, not the counter.
"""

from __future__ import annotations

from outbox_pipelines.core.position import Snapshot


class Quiet:
    """What is known of one outbox."""

    def __init__(self) -> None:
        self._last: bytes | None = None
        self._below = 0
        """The counter of transaction ids when the sequence was seen to have moved."""
        self._has_moved = True
        self._running: frozenset[int] = frozenset()
        self._done: Snapshot | None = None
        self.awaits_commit = False
        """Whether an event that has just taken its number may be about to commit."""

    def has_read(self, done: Snapshot) -> None:
        """Record that all that `done` sees is read.

        Args:
            done: a snapshot that was taken after the last answer of `is_new`.
        """
        running = self._running
        if self._has_moved:
            running = frozenset((*done.xip, *range(done.xmax, self._below)))
        self._running = frozenset(tx for tx in running if tx < self._below and not done.sees(tx))
        self.awaits_commit = self._has_moved and bool(self._running)
        self._has_moved = False
        self._done = done

    def is_new(self, snapshot: bytes, last: bytes | None, age: bytes) -> bool:
        """Return whether there may be something that is not read.

        Args:
            snapshot: the current one, taken before the others were read.
            last: the last number of the sequence; None if it says nothing.
            age: how far the counter of transaction ids is from 3, in 32 bits; read after `last`.
        """
        if last is None:
            self._last = None
            return self._done is None or Snapshot.parse(snapshot.decode()) != self._done
        if last != self._last:
            now = Snapshot.parse(snapshot.decode())
            self._last, self._has_moved = last, True
            self._below = now.xmax + (int(age) + 3 - now.xmax) % (1 << 32)
            return True
        if not self._running:
            return False
        now = Snapshot.parse(snapshot.decode())
        return any(now.sees(tx) for tx in self._running)
