"""Whether an outbox can have an event that has not been read: from its sequence, and without reading a table.

Invariants:
- An event takes its number (`seq`) before it commits. So if the sequence has not moved since the reader's
  snapshot, an unread event belongs to a transaction that ran then: those are remembered, and the end of each
  is news.
- Anything it cannot judge is news: the cost is a look into the table, never an event.
- An INSERT that is the first statement of its transaction takes the number just before the transaction's id.
  If its process is stopped between the two, its event is found when the reader looks without news
  (`watcher.py`: every two seconds).
"""

from __future__ import annotations

from outbox_pipelines.position import Snapshot


class Quiet:
    """What is known of one outbox."""

    def __init__(self) -> None:
        self._last: bytes | None = None
        self._has_moved = True
        self._running: frozenset[int] = frozenset()
        self._done: Snapshot | None = None

    def has_read(self, done: Snapshot) -> None:
        """Record that all that `done` sees is read.

        Args:
            done: a snapshot that was taken after the last answer of `is_new`.
        """
        running = frozenset(done.xip)
        self._running = running if self._has_moved else self._running & running
        self._has_moved = False
        self._done = done

    def is_new(self, snapshot: bytes, last: bytes | None) -> bool:
        """Return whether there may be something that is not read.

        Args:
            snapshot: the current one, taken before `last` was read.
            last: the last number of the sequence; None if it says nothing.
        """
        if last is None:
            self._has_moved = True
            return self._done is None or Snapshot.parse(snapshot.decode()) != self._done
        if last != self._last:
            self._last, self._has_moved = last, True
            return True
        if not self._running:
            return False
        now = Snapshot.parse(snapshot.decode())
        return any(now.sees(tx) for tx in self._running)
