"""Detects a pooler in transaction mode before the database, where sessions are not our own.

Invariants:
- In transaction mode, a pooler may run each transaction on another server connection. A session lock would
  belong to two relays, or stay behind in the pool; so would settings, in the sessions of the application.
- Nothing here changes a session.
"""

from __future__ import annotations

from typing import Any

import psycopg

from outbox_pipelines.errors import SetupError

# A short timeout of the role or the database must not end it. Both in one transaction, without BEGIN.
_PID = "SET LOCAL statement_timeout = 0; SELECT pg_backend_pid()"
# The order in which two connections ask. Whether a pooler assigns the connection used last or the next in
# turn, at least one of the two then sees a second server connection.
_ORDER = (0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1)


def is_between(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a pooler answers for the database: it gives clients process ids of its own."""
    return _pid(connection) != connection.info.backend_pid


async def is_between_async(connection: psycopg.AsyncConnection[Any]) -> bool:
    """As `is_between`."""
    cursor = await connection.execute(_PID, prepare=False)
    cursor.nextset()
    return await cursor.fetchone() != (connection.info.backend_pid,)


def refuse(one: psycopg.Connection[Any], other: psycopg.Connection[Any], setting: str) -> None:
    """Raise `SetupError` if statements of one session run on several server connections.

    Args:
        setting: that names the database, for the message.
    """
    pids: tuple[set[int], set[int]] = (set(), set())
    for n in _ORDER:
        pids[n].add(_pid((one, other)[n]))
    if len(pids[0]) > 1 or len(pids[1]) > 1 or pids[0] & pids[1]:
        raise SetupError(
            f"{setting} leads through a pooler in transaction mode, where locks and settings of a session "
            "reach other clients: name the database itself, or a pool in session mode"
        )


def _pid(connection: psycopg.Connection[Any]) -> int:
    cursor = connection.execute(_PID, prepare=False)
    cursor.nextset()
    row = cursor.fetchone()
    assert row is not None
    return int(row[0])
