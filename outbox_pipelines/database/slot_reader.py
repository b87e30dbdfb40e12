"""The session that reads a replication slot, and its end.

A server notices that a client has ended a moment later, and until then the slot is in use.

Invariants:
- A slot is dropped only if no session reads it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

import psycopg

from outbox_pipelines.database import Connection

LEAVE_SECONDS: Final = 10.0
"""How long the end of a reader that was stopped is waited for."""
_POLL: Final = 0.05
# Of other roles' sessions, every role sees these columns but the address.
_READER: Final = """
SELECT r.active_pid, format('process %%s (%%s, role %%s%%s)', r.active_pid,
                            coalesce(nullif(a.application_name, ''), 'no application name'),
                            coalesce(a.usename, '?'), ', from ' || host(a.client_addr))
FROM pg_replication_slots r LEFT JOIN pg_stat_activity a ON a.pid = r.active_pid
WHERE r.slot_name = %(slot)s AND r.active_pid IS NOT NULL"""
# No slot is moved to this position. A role that may not use slots is refused before the position is.
_MAY_READ: Final = "SELECT pg_replication_slot_advance('outbox', '0/0')"
DROP_SLOT: Final = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
WHERE slot_name = %(slot)s AND database = current_database()"""


def reader(connection: Connection, slot: str, *, pid: int | None = None) -> str | None:
    """Return who reads the slot: process, application, role and address; None if no session does.

    Args:
        pid: only if it is this process of the server.
    """
    row = connection.execute(_READER, {"slot": slot}).fetchone()
    return None if row is None or pid not in (None, row[0]) else str(row[1])


def barred_role(connection: Connection) -> str | None:
    """Return the session's role, quoted, if it may not use slots.

    The server decides: a managed service has roles whose members may, without the attribute REPLICATION.
    """
    try:
        with connection.transaction():
            connection.execute(_MAY_READ)
    except psycopg.errors.InsufficientPrivilege:
        row = connection.execute("SELECT quote_ident(current_user)").fetchone()
        return str(row and row[0])
    # Older servers have no code for a wrong position.
    except (psycopg.errors.InvalidParameterValue, psycopg.errors.InternalError_):
        return None
    raise AssertionError("a slot was moved to the position 0/0")


def await_end(connection: Connection, slot: str, *, seconds: float, pid: int | None = None) -> str | None:
    """Wait until no session reads the slot; return who still does after this time, as `reader` does."""
    deadline = time.monotonic() + seconds
    while (found := reader(connection, slot, pid=pid)) is not None and time.monotonic() < deadline:
        time.sleep(_POLL)
    return found


def drop(connection: Connection, slot: str, *, seconds: float) -> str | None:
    """Drop a slot of this database when no session reads it; return who still does after this time."""
    deadline = time.monotonic() + seconds
    while (found := await_end(connection, slot, seconds=deadline - time.monotonic())) is None:
        # Another session may begin to read it in between.
        with suppress(psycopg.errors.ObjectInUse):
            connection.execute(DROP_SLOT, {"slot": slot})
            return None
    return found
