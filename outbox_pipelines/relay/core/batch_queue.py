"""The queue of batches from the reader to the publisher.

Invariants:
- At most two batches wait. The reader waits with a third, so that a slow Kafka does not fill the memory.
  Claims, which are few, do not wait: `add`.
- Small ticks in the queue are joined: a publisher that was busy gets everything read since then at once, and
  no event waits for a second transaction.
- Each call is atomic: see `relay.shared`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from outbox_pipelines.relay.core.batch import Batch

_MOST: Final = 2
# Limits of a batch that may be joined with others.
_SMALL_EVENTS: Final = 1000
_SMALL_SIZE: Final = 1_000_000


class BatchQueue:
    """A queue for one reader and one publisher; None is the end of what is to be read."""

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
        """Return whether the first batch is wanted, or is the end. Otherwise others may still join it."""
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

    def _joins(self, batch: Batch | None) -> bool:
        last = self._waiting[-1] if self._waiting else None
        return batch is not None and last is not None and _is_small(last) and _is_small(batch)


def _is_small(batch: Batch) -> bool:
    return batch.is_whole and len(batch.events) < _SMALL_EVENTS and batch.size < _SMALL_SIZE
