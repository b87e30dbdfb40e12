"""Detects a pooler in transaction mode before the database, where session locks do not work.

Invariants:
- A session lock belongs to one server connection. In transaction mode, a pooler may run each transaction on
  another connection, so two relays could own the same lock, or neither. The lock of a command can stay behind
  in the pool when the command has ended.
"""

from __future__ import annotations

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

_PID = "SELECT pg_backend_pid()"
# The order in which two connections ask. Whether a pooler assigns the connection used last or the next in
# turn, at least one of the two then sees a second server connection.
_ORDER = (0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1)


def refuse(connection: Connection, settings: Settings) -> None:
    """Raise `SetupError` if statements of one session run on several server connections."""
    with connect(settings, name="outbox relay: pooler?", beside=connection) as other:
        pids: tuple[set[int], set[int]] = (set(), set())
        for n in _ORDER:
            row = (connection, other)[n].execute(_PID, prepare=False).fetchone()
            assert row is not None
            pids[n].add(row[0])
    if len(pids[0]) > 1 or len(pids[1]) > 1 or pids[0] & pids[1]:
        raise SetupError(
            "OUTBOX_DSN leads through a pooler in transaction mode, where the lock of a session has no "
            "effect: name the database itself, or a pool in session mode"
        )


def refuse_if_pooled(connection: Connection, settings: Settings) -> None:
    """Do the same with one statement where no pooler is: poolers give clients process ids of their own."""
    if connection.execute(_PID, prepare=False).fetchone() != (connection.info.backend_pid,):
        refuse(connection, settings)
