"""The right to relay something: a shard of the append-only outbox, or a marked table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString, Protocol

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.sqlstates import is_outage
from outbox_pipelines.database import Connection
from outbox_pipelines.relay.core.errors import ShardLostError


class Ownership(Protocol):
    """The right to relay: wait for it, take it, keep the lease, release it; for one thread, except `beat`."""

    shard: int
    """Its number; 0 for a marked table."""
    pid: int
    """The server process of the session that owns it."""

    def waits_since(self) -> float | None:
        """Return since when that session waits for an answer; from any thread."""

    def try_wait(self) -> bool:
        """Become the one that waits; return False if another one does already."""

    def try_take(self) -> bool:
        """Take it if nothing owns it; return whether it is taken."""

    def execute(self, query: LiteralString, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement in the session that owns it; return its rows."""

    def is_awaited(self) -> bool:
        """Return whether another relay waits."""

    def beat(self) -> None:
        """Send a heartbeat. From any thread."""

    def end_silent(self) -> None:
        """End the session of an owner that is frozen, where the database does not do it in time."""

    def intruder(self) -> tuple[int, str] | None:
        """Return a session that holds the lock and is no relay: its process, and a description."""

    def describe_owner(self) -> str:
        """Return who owns it since when, for people."""

    def release(self) -> None:
        """Give it back, if it is owned."""


def lost(owned: str, connection: Connection, error: psycopg.Error) -> ShardLostError:
    """Return what to raise if a statement of the session that owns something has failed by an outage.

    Raises:
        psycopg.Error: the error, if it is no outage: to start over would repeat it.
    """
    if not is_outage(error):
        raise error
    owner = f"the session that owns {owned}"
    what = f"{owner} has ended" if connection.broken else f"a statement of {owner} has failed"
    return ShardLostError(f"{what}: {first_line(error)}")
