"""The right to relay a shard of the append-only outbox, or a marked table, and what keeps its session.

Invariants:
- It belongs to a session, which the database ends if its owner is silent for the length of the lease.
- While the thread of the session does other work, another thread sends heartbeats: a stopped process sends
  none. One that fails ends the heartbeats: the session is lost, and its next statement raises the error.
- What a proxy or a pooler acknowledges and does not pass on looks like a statement that takes long. A second
  connection asks the server; without its answer nothing is concluded.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, LiteralString

import psycopg

from outbox_pipelines.core import log
from outbox_pipelines.core.outages import is_outage
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.table_locks import LimitedSession
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import relay_sql
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.settings import RelaySettings

_LOG = logging.getLogger(__name__)


class Ownership(ABC):
    """The right to relay: wait for it, take it, keep the lease, return it; for one thread, except `beat`."""

    shard: int
    """Its number; 0 for a marked table."""
    pid: int
    """The server process of the session that owns it."""

    def __init__(self, settings: RelaySettings, owner: str) -> None:
        self._settings = settings
        self._connection = connect(settings, name=f"outbox relay: {owner}")
        self._others: list[tuple[LimitedSession, int]] = []
        """Further sessions of this relay, each with its server process."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """What is owned, for messages."""

    @property
    def _known(self) -> Mapping[str, Any]:
        """Parameters that every statement may use."""
        return {}

    @abstractmethod
    def try_wait(self) -> bool:
        """Become the one that waits; return False if another one does already."""

    @abstractmethod
    def try_take(self) -> bool:
        """Take it if nothing owns it; return whether it is taken."""

    @abstractmethod
    def is_awaited(self) -> bool:
        """Return whether another relay waits."""

    @abstractmethod
    def beat(self) -> None:
        """Send a heartbeat. From any thread.

        Raises:
            ShardLostError: the session has ended.
        """

    @abstractmethod
    def end_silent(self) -> None:
        """End the session of an owner that is frozen, where the database does not do it in time."""

    @abstractmethod
    def intruder(self) -> tuple[int, str] | None:
        """Return a session that has the lock and is no relay: its process, and a description.

        Process 0 stands for no session: the text says why no relay may own it now.
        """

    @abstractmethod
    def describe_owner(self) -> str:
        """Return who owns it, and since when, for messages."""

    @abstractmethod
    def close(self) -> None:
        """Return it, if it is owned, and close the session."""

    def longest_wait(self) -> tuple[float, int] | None:
        """Return since when a session of this relay waits for an answer, and its process; from any thread."""
        waits = [(one.waits_since, pid) for one, pid in [(self._connection, self.pid), *self._others]]
        return min(((since, pid) for since, pid in waits if since is not None), default=None)

    def _also(self, connection: LimitedSession, pid: int) -> None:
        """Also notice when this session of the relay waits for an answer that cannot come."""
        self._others = [each for each in self._others if not each[0].closed] + [(connection, pid)]

    def execute(self, query: LiteralString | bytes, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement in the session that owns it; return its rows.

        Raises:
            ShardLostError: the session has ended.
        """
        try:
            cursor = self._connection.execute(query, {**self._known, **parameters})
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Commit everything inside the block together, or nothing."""
        try:
            with self._connection.transaction():
                yield self._connection
        except psycopg.OperationalError as error:
            raise self._lost(error) from error

    def _ask(self, query: LiteralString, lock: Mapping[str, Any]) -> bool:
        rows = self.execute(query, lock)
        return bool(rows and rows[0][0])

    def _lost(self, error: psycopg.Error) -> ShardLostError:
        """Return what to raise if a statement of the session has failed by an outage.

        Raises:
            psycopg.Error: the error, if it is no outage: to start over would repeat it.
        """
        if not is_outage(error):
            raise error
        owner = f"the session that owns {self._name}"
        what = f"{owner} has ended" if self._connection.broken else f"a statement of {owner} has failed"
        return ShardLostError(f"{what}: {first_line(error)}")


def limit_silence(
    connection: Connection, settings: RelaySettings, setting: str = "idle_session_timeout"
) -> None:
    """Have the database end a session that is silent for the lease.

    Otherwise a stopped process would keep what it owns, or its turn as successor, indefinitely.
    """
    lease = f"{int(settings.lease_seconds * 1000)}ms"
    connection.execute(relay_sql.LIMIT, {"setting": setting, "lease": lease})


@contextmanager
def beating(beat: Callable[[], object], every: float) -> Iterator[None]:
    """Call `beat` at this interval, in seconds, while the block runs.

    Without it, work that takes longer than the lease (such as recovering a transaction over a slow network)
    would lose the shard, and so would every further attempt.
    """
    end = threading.Event()

    def run() -> None:
        while not end.wait(every):
            try:
                beat()
            except (ShardLostError, psycopg.Error):
                return

    thread = threading.Thread(target=log.inherit(run), name="outbox-heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def noticing(
    settings: RelaySettings, ownership: Ownership, lost: threading.Event
) -> AbstractContextManager[None]:
    """Set `lost` when a session has waited for three times the lease for an answer that cannot come."""
    doubted: tuple[float, int] | None = None

    def look() -> None:
        nonlocal doubted
        wait = ownership.longest_wait()
        is_late = wait is not None and time.monotonic() - wait[0] > 2 * settings.lease_seconds
        if wait is None or not is_late or _is_worked_for(settings, wait[1]):
            doubted = None
        elif wait != doubted:
            # Its answer may have come just now: if so, it is taken until the next look.
            doubted = wait
        else:
            _LOG.warning("the database has no statement of this relay, which waits for its answer")
            lost.set()
            raise ShardLostError("nothing is left to look at")

    return beating(look, settings.lease_seconds)


def _is_worked_for(settings: RelaySettings, pid: int) -> bool:
    try:
        with closing(connect(settings, name="outbox relay: lost?")) as connection:
            return connection.execute(relay_sql.IS_WORKED_FOR, {"pid": pid}).fetchone() != (False,)
    except (SetupError, psycopg.Error):
        return True
