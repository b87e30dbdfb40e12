"""What has been read and not been published yet: the way from the reader to the publisher.

Invariants:
- At most two pieces wait; the reader waits with a third, so that a slow Kafka fills no memory.
- Small ticks that wait become one: a publisher that was busy gets at once all that has come meanwhile, and
  nothing that is read waits behind its next transaction.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Final

from outbox_pipelines.event import Piece

_MOST: Final = 2
# Of a piece that others may join.
_SMALL_EVENTS: Final = 1000
_SMALL_SIZE: Final = 1_000_000


class Pieces:
    """A queue for one reader and one publisher; None is the end of what is to be read."""

    def __init__(self) -> None:
        self._waiting: deque[Piece | None] = deque()
        self._changed = threading.Condition()

    def put(self, piece: Piece | None, seconds: float) -> bool:
        """False where there has been no room for so long."""
        with self._changed:
            if self._joins(piece):
                return True
            if not self._changed.wait_for(lambda: len(self._waiting) < _MOST, seconds):
                return False
            self._waiting.append(piece)
            self._changed.notify_all()
            return True

    def get(self, seconds: float, wanted: Callable[[Piece], bool]) -> Piece | None:
        """The next one, which stays here while it is not wanted: others may join it.

        Raises:
            Empty: there has been none for so long.
        """

        def is_there() -> bool:
            return bool(self._waiting) and (self._waiting[0] is None or wanted(self._waiting[0]))

        with self._changed:
            if not self._changed.wait_for(is_there, seconds):
                raise Empty
            piece = self._waiting.popleft()
            self._changed.notify_all()
            return piece

    def _joins(self, piece: Piece | None) -> bool:
        last = self._waiting[-1] if self._waiting else None
        if piece is None or last is None or not (_is_small(last) and _is_small(piece)):
            return False
        self._waiting[-1] = last.followed_by(piece)
        return True


def _is_small(piece: Piece) -> bool:
    return piece.is_whole and len(piece.events) < _SMALL_EVENTS and piece.size < _SMALL_SIZE
