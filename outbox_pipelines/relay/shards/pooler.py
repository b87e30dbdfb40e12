"""Finds out whether a pooler stands between the relay and its database, in a mode in which locks do not hold.

Invariants:
- A session's lock belongs to a connection of the server. In transaction mode a pooler gives every transaction
  another one, so two relays could hold "one" lock, or neither.
"""

from __future__ import annotations

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

_PID = "SELECT pg_backend_pid()"
# In which order two connections ask: whichever way a pooler shares its connections out, be it the one used
# last or one after the other, somebody meets another one.
_ORDER = (0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1)


def refuse(connection: Connection, settings: Settings) -> None:
    """`SetupError` where statements of one session meet several connections of the server."""
    with connect(settings, name="outbox relay: pooler?", beside=connection) as other:
        pids: tuple[set[int], set[int]] = (set(), set())
        for n in _ORDER:
            row = (connection, other)[n].execute(_PID, prepare=False).fetchone()
            assert row is not None
            pids[n].add(row[0])
    if len(pids[0]) > 1 or len(pids[1]) > 1 or pids[0] & pids[1]:
        raise SetupError(
            "OUTBOX_DSN leads through a pooler in transaction mode, where the relay's lock would hold "
            "nothing: name the database itself, or a pool in session mode"
        )
