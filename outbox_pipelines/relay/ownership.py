"""The right to relay something: a shard of the append-only outbox, or a marked table.

Invariants:
- It belongs to a session, which the database ends if its owner is silent for the length of the lease.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.sqlstates import is_outage
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.relay import queries
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.settings import Settings


class Ownership(ABC):
    """The right to relay: wait for it, take it, keep the lease, release it; for one thread, except `beat`."""

    shard: int
    """Its number; 0 for a marked table."""
    pid: int
    """The server process of the session that owns it."""

    def __init__(self, settings: Settings, owner: str) -> None:
        self._settings = settings
        self._connection = connect(settings, name=f"outbox relay: {owner}")

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
        """Return a session that holds the lock and is no relay: its process, and a description.

        Process 0 is none: the text says why no relay may take it now.
        """

    @abstractmethod
    def describe_owner(self) -> str:
        """Return who owns it since when, for people."""

    @abstractmethod
    def release(self) -> None:
        """Give it back, if it is owned."""

    def waits_since(self) -> float | None:
        """Return since when the session that owns it waits for an answer; from any thread."""
        return self._connection.waits_since

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


def limit_silence(connection: Connection, settings: Settings, setting: str = "idle_session_timeout") -> None:
    """Have the database end a session that is silent for the lease.

    Otherwise a stopped process would keep what it owns, or its turn as successor, indefinitely.
    """
    lease = f"{int(settings.lease_seconds * 1000)}ms"
    connection.execute(queries.LIMIT, {"setting": setting, "lease": lease})
