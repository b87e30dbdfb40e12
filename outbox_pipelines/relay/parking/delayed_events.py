"""Moves delayed events into the outbox when they are due: from there on they are ordinary events.

Invariants:
- Every owner of a shard does it for all shards: a shard without a relay delays no others. The function in the
  database lets in one at a time, and keeps the order.
- What cannot be moved ends no relay: events that need no move are published, and the status names the cause.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import psycopg

from outbox_pipelines.core.outages import code_of
from outbox_pipelines.core.repeated_lines import RepeatedLines
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql

_LOG: Final = logging.getLogger(__name__)
_EVERY: Final = 1.0
# A call takes some 30 ms, and the thread that makes it also settles.
_MOST: Final = 500
_SECONDS: Final = 0.2
# Another session has a lock, has won, or has canceled the statement: the session that owns the shard goes on.
_PASSING: Final = frozenset(("40001", "40P01", "55P03", "55006", "57014"))


class DelayedEvents:
    """The delayed events of an outbox, for the thread of the session that owns a shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._look_at = 0.0
        self._lines = RepeatedLines(_LOG)

    def look(self, now: float) -> None:
        """About once a second, move what is due; for a moment only.

        Raises:
            ShardLostError: the session has ended.
        """
        if now < self._look_at:
            return
        until = time.monotonic() + _SECONDS
        is_more = True
        while is_more and time.monotonic() < until:
            is_more = self._move()
        self._look_at = now if is_more else now + _EVERY

    def move_all(self) -> None:
        """Move all that is due.

        Raises:
            ShardLostError: the session has ended.
        """
        while self._move():
            pass

    def _move(self) -> bool:
        """Move some; return whether more may be due."""
        try:
            ((moved,),) = self._shard.execute(parking_sql.MOVE_DUE, {"most": _MOST})
        except (ShardLostError, psycopg.Error) as error:
            cause = error.__cause__ or error
            if isinstance(error, ShardLostError) and code_of(cause) not in _PASSING:
                raise
            self._lines.log("move", "delayed events cannot be moved into the outbox: %s", first_line(cause))
            return False
        self._lines.end("move", "delayed events are moved again")
        return int(moved) >= _MOST
