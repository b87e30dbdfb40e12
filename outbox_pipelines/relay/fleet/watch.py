"""The watch of one outbox of a fleet: its reader waits with it until there can be an unread event.

Invariants:
- The reader does not use its connection until it is woken.
- Every reader is woken after `LONGEST` seconds and looks into its table, whatever its sequence says.
- An event takes its number (`seq`) before it commits, and a look sees the sequence before it sees the counter
  of transaction ids. So an event whose number was seen is of a transaction with an id below that counter:
  those that the reader's snapshot does not see are remembered, and the end of each is news.
- Anything it cannot judge is news: the cost is a look into the table, never an event.
- An INSERT that is the first statement of its transaction takes the number just before the transaction's id.
  If a look comes between the two, the event is found when the reader looks without news.

A snapshot does not name all running transactions: its xmax follows the last one that ended, not the counter.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.database import Connection
from outbox_pipelines.relay.fleet import fleet_sql

# Seconds between two questions: while nothing happens, for some seconds after an event, and while a
# transaction that wrote one is about to commit.
IDLE: Final = 0.04
BUSY: Final = 0.02
COMMIT: Final = 0.005
_BUSY_SECONDS: Final = 5.0
# A transaction that takes longer is not waited for so often: on a slow server that would make it slower.
_COMMIT_SECONDS: Final = 0.03
LONGEST: Final = 2.0
# How often a reader looks whether its sequence can still be trusted: a person may change it.
_SEQUENCE_SECONDS: Final = 60.0
# The names of the prepared questions about one outbox, and about several.
ONE: Final = b"outbox_watch_one"
MANY: Final = b"outbox_watch_many"


class FleetWatch:
    """The watch of one outbox's reader: implements `relay.run.Watch`.

    Args:
        lend: has a reader waited for.
        database: equal for connections whose sessions see the same sequences.
        ending: whether the reader must end.
    """

    def __init__(
        self,
        lend: Callable[[FleetWatch], None],
        connection: Connection,
        database: Hashable,
        ending: Callable[[], bool],
    ) -> None:
        self.connection = connection
        self.database = database
        self.ending = ending
        self._quiet = Quiet()
        self.sequence: int | None = None
        self.until = 0.0
        self._busy_until = 0.0
        self._commit_until = 0.0
        self.error: BaseException | None = None
        self.woken = threading.Event()
        self._lend = lend
        self._sequence_until = 0.0
        for name, query in ((ONE, fleet_sql.WATCH_ONE), (MANY, fleet_sql.WATCH_MANY)):
            connection.pgconn.send_prepare(name, query)
            *_, result = connection.wait(generators.execute(connection.pgconn))
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.OperationalError(message(result))

    def wait(self, done: Snapshot, seconds: float) -> None:
        """Return when there may be something that `done` does not see, or when the reader must end."""
        now = time.monotonic()
        if now >= self._sequence_until:
            row = self.connection.execute(fleet_sql.SEQUENCE).fetchone()
            self.sequence = None if row is None else row[0]
            self._sequence_until = now + _SEQUENCE_SECONDS * random.uniform(0.8, 1.2)
        self._quiet.has_read(done)
        self._commit_until = now + _COMMIT_SECONDS if self._quiet.awaits_commit else 0.0
        self.until = now + LONGEST * random.uniform(0.8, 1.0)
        self.woken.clear()
        self._lend(self)
        self.woken.wait()
        if self.error is not None:
            raise self.error

    def every(self, now: float) -> float:
        """Return the seconds between two queries."""
        if now < self._commit_until:
            return COMMIT
        return BUSY if now < self._busy_until else IDLE

    def is_new(self, snapshot: bytes, number: bytes | None, age: bytes) -> bool:
        """Return whether there may be something that is not read: see `Quiet`."""
        if not self._quiet.is_new(snapshot, number, age):
            return False
        # Without a number, any transaction of the server is news.
        if number is not None:
            self._busy_until = time.monotonic() + _BUSY_SECONDS
        return True


def message(result: PGresult | None) -> str:
    """Return what the server says about a result that is no success."""
    text = b"" if result is None else result.error_message
    return text.decode(errors="replace").strip() or "the server closed the connection"


class Quiet:
    """Infers from an outbox's sequence whether there can be new events, without reading a table."""

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
            age: distance of the counter of transaction ids from 3, in 32 bits; read after `last`.
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
