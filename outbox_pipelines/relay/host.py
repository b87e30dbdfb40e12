"""What a relay shares with the other relays of its process. Alone it shares nothing.

Invariants:
- Nothing here decides what is read, published or settled: a host that fails or is slow can delay a relay, and
  never make it skip an event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.database import Connection
from outbox_pipelines.relay.core.flow import REPORT_POLL
from outbox_pipelines.relay.ownership import Ownership
from outbox_pipelines.relay.shard import Shard


class Watch(Protocol):
    """Waits for new events, for one reader."""

    def wait(self, done: Snapshot, seconds: float) -> None:
        """Return when there may be something that `done` does not see, or when the reader must end.

        The reader's connection is not used by the reader while it waits.

        Args:
            done: what has been read.
            seconds: the pause of a reader that is alone.

        Raises:
            psycopg.OperationalError: the connection is lost.
        """


class Turn:
    """The right to publish an event that may crash the process. Alone, a relay always has it.

    If two relays had it at once, a crash would count against the events of both.
    """

    def wait(self, ending: Callable[[], bool]) -> None:
        """Wait for it; return when this relay has it, or must end."""

    def take(self) -> bool:
        """Return whether this relay has it now."""
        return True

    def give_back(self) -> None:
        """Let the next relay have it, if this one has it."""


class Host:
    """The process of a relay that is alone."""

    patience = 1.0
    """How many times as long the publishing thread waits for events, before it looks after other things."""

    report_poll = REPORT_POLL
    """How often the publishing thread looks for new events while acknowledgments are awaited, in seconds."""

    def watch(
        self, shard: Shard, connection: Connection, *, ending: Callable[[], bool], end: threading.Event
    ) -> Watch:
        """Return what the reader of this shard waits with.

        Args:
            connection: the reader's own.
            ending: whether the reader must end.
            end: set when the reader must end at once.
        """
        return _Alone(end)

    def must_hand_over(self, owned: Ownership) -> bool:
        """Return whether the relay is to pass this shard on. Asked often, in the thread of its session."""
        return False

    def turn(self) -> Turn:
        """Return a relay's turn among those that publish what may have crashed the process."""
        return _NO_TURN


class _Alone:
    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def wait(self, done: Snapshot, seconds: float) -> None:
        self._end.wait(seconds)


_NO_TURN: Final = Turn()
ALONE: Final = Host()
