"""Follows a connector that publishes in place of the relay: the position moves as its slot is confirmed.

So days are closed and archived, and events are found, as if the relay had published them.

Invariants:
- A position is taken only if everything that it sees lies before what the connector has confirmed, which it
  does after Kafka has it.
- Nothing is published. When the connector has ended, `position_behind` says what it has published: in the
  slot and in the topics, transaction by transaction.
"""

from __future__ import annotations

import threading
from typing import Final

from outbox_pipelines.database import Connection
from outbox_pipelines.position import Snapshot
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.core.batch import Batch

_POLL_SECONDS: Final = 0.5


class FollowedSource:
    """What a connector publishes from a slot, as batches without events.

    Args:
        connection: in autocommit mode.
        done: the position; not within a tick.
    """

    def __init__(self, connection: Connection, slot: str, done: Snapshot) -> None:
        self._connection = connection
        self._slot = slot
        self._mark: tuple[Snapshot, int] | None = None
        self._end: Snapshot | None = None
        self.has_caught_up = True
        """Whether there is nothing that a relay could publish."""
        self.is_ended = False
        """Whether the position is the connector's last one."""
        self.done = done
        """How far the connector is known to be."""

    def read(self) -> Batch | None:
        """Return a batch that moves the position; None if there is no news."""
        if self.is_ended:
            return None
        self.is_ended = self._end is not None
        target = self._end or self._confirmed()
        if target is None or target == self.done or not target.covers(self.done):
            return None
        batch = Batch([], 0, self.done, target, ends_tick=True)
        self.done = target
        return batch

    def end_at(self, position: Snapshot) -> None:
        """Let the next batch move the position to this one, the last: what the connector has published."""
        self._end = position

    def wait(self, end: threading.Event) -> None:
        """Wait until there may be news, or the reader may have to end."""
        end.wait(_POLL_SECONDS)

    def confirm(self) -> None:
        """Nothing is to be confirmed."""

    def close(self) -> None:
        """Nothing is open."""

    def _confirmed(self) -> Snapshot | None:
        row = self._connection.execute(queries.CONFIRMED, {"slot": self._slot}).fetchone()
        if row is None or row[0] is None:
            return None
        if self._mark is None:
            found = self._connection.execute(queries.MARK).fetchone()
            assert found is not None
            self._mark = Snapshot.parse(found[0]), found[1]
        snapshot, position = self._mark
        if row[0] < position:
            return None
        self._mark = None
        return snapshot
