"""Keeps the table's slot to the command that goes back, so that its reader cannot start before the end.

Invariants:
- While the slot is held, no other session reads it. Nothing is read from it, and nothing is confirmed.
- If the command ends, the server lets go of the slot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import psycopg

from outbox_pipelines.adopt import queries
from outbox_pipelines.adopt import slot as slots
from outbox_pipelines.adopt.facts import Facts
from outbox_pipelines.adopt.renaming import Say
from outbox_pipelines.adopt.state import State
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.relay.cdc.stream import Stream
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings

_POLL: Final = 0.05
_END_SECONDS: Final = 10.0


@contextmanager
def held(
    settings: Settings, connection: Connection, state: State, found: Facts, say: Say
) -> Iterator[int | None]:
    """Hold the slot for the length of the block; yield the server's process that does.

    None: the table has no slot, or this role cannot hold it; then a line says what not to do.

    Raises:
        NotReadyError: another session reads it.
    """
    slot = None if state.slot is None else slots.read(connection, state.slot)
    if slot is None or slot.lost is not None:
        yield None
        return
    if why := _obstacle(connection, slot):
        say(f"the slot {slot.name} cannot be held, because {why}: start its reader only after this command")
        yield None
        return
    publications = slots.publications(connection, found, settings.db_schema)
    with closing(connect(settings, name="outbox adopt: slot", replication=True)) as replication:
        replication.execute(queries.NO_TIMEOUT)
        try:
            # Without a publication of the table nothing is delivered, and the slot is held all the same.
            Stream(replication, slot.name, publications[0].name if publications else slot.name)
        except psycopg.errors.ObjectInUse:
            raise NotReadyError(
                f"another session reads the slot {slot.name}: stop the connector (PUT "
                "/connectors/NAME/stop), and run the command again"
            ) from None
        except psycopg.Error as error:
            say(
                f"the slot {slot.name} cannot be held ({first_line(error)}): start its reader only after this"
            )
            yield None
            return
        pid = replication.info.backend_pid
        yield pid
    _await_end(connection, slot.name, pid)


def _obstacle(connection: Connection, slot: slots.Slot) -> str | None:
    may = connection.execute(queries.MAY_READ_SLOTS).fetchone()
    if may is not None and not may[0]:
        return f"role {may[1]} may not read slots (ALTER ROLE {may[1]} REPLICATION)"
    return None if slot.plugin == slots.PLUGIN else f"it has the plugin {slot.plugin}"


def _await_end(connection: Connection, name: str, pid: int) -> None:
    """Return when the reader can start: a moment after the session was closed."""
    deadline = time.monotonic() + _END_SECONDS
    while (slot := slots.read(connection, name)) is not None and slot.reader == pid:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL)
