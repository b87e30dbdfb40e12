"""The arguments and results of a relay's run, and the protocols of what the relays of a process share.

Invariants:
- A relay that is alone shares nothing. A host does not decide what is read, published or settled: a host that
  fails or is slow can delay a relay, but cannot make it skip an event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.database import Connection
from outbox_pipelines.relay.core.flow import REPORT_POLL
from outbox_pipelines.relay.core.parked import DeadLetter
from outbox_pipelines.relay.lease.owner_session import Ownership
from outbox_pipelines.relay.lease.shard import Settled, Shard
from outbox_pipelines.relay.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The arguments of `service.relay` that its workers share: after an outage, the next one has the same."""

    stop: threading.Event
    """Set by the caller, or by a worker that passes its shard on."""
    until_empty: bool
    """Whether to end after publishing the events that are committed at the start."""
    hand_over_after: float | None
    on_progress: Callable[[Settled], None]
    on_dead_letter: Callable[[DeadLetter], None]
    metrics: Metrics
    host: Host

    def must_hand_over(self, owned: Ownership, since: float) -> bool:
        """Return whether to pass on what is owned since then. Asked often, in the thread of its session."""
        if self.stop.is_set():
            return False
        is_over = (
            self.hand_over_after is not None
            and time.monotonic() - since >= self.hand_over_after
            # Without a successor the relay continues: the process that starts relays may have crashed.
            and owned.is_awaited()
        )
        return is_over or self.host.must_hand_over(owned)


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
    """The host of a relay that is alone in its process."""

    patience = 1.0
    """How many times as long the publishing thread waits for events, before it does other work."""

    report_poll = REPORT_POLL
    """How often the publishing thread looks for new events while acknowledgments are awaited, in seconds."""

    def watch(
        self, shard: Shard, connection: Connection, *, ending: Callable[[], bool], end: threading.Event
    ) -> Watch:
        """Return the watch with which the reader of this shard waits.

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


@dataclass(slots=True)
class Totals:
    """The totals of a worker."""

    events: int = 0
    unpublished: int = 0
    """After a run until empty: events of the table that are parked or dead letters."""
    seconds: float = 0.0
    paused: int = 0
    """How many of `unpublished` wait for their next attempt because a relay crashed while it tried them."""
    paused_seconds: float = 0.0
    """Minimum seconds until the first of these is due."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.events + other.events,
            self.unpublished + other.unpublished,
            self.seconds + other.seconds,
            self.paused + other.paused,
            max(self.paused_seconds, other.paused_seconds),
        )
