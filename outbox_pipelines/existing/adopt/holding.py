"""Keeps the table's slot to the command that goes back, so that its reader cannot start before the end.

Invariants:
- While the slot is held, no other session reads it. Nothing is read from it, and nothing is confirmed.
- If the command ends, the server lets go of the slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, slot_reader
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.adopt import queries
from outbox_pipelines.existing.adopt import slot as slots
from outbox_pipelines.existing.adopt.facts import Facts
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.existing.adopt.state import State
from outbox_pipelines.relay.read.slot.stream import InUseError, borrowed
from outbox_pipelines.settings import Settings

_NAME: Final = "outbox adopt: slot"


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
    # Without a publication of the table nothing is delivered, and the slot is held all the same.
    publication = publications[0].name if publications else slot.name
    given = (settings, connection, slot.name, publication)
    limit = slot_reader.LEAVE_SECONDS
    with ExitStack() as hold:
        try:
            _, pid = hold.enter_context(borrowed(*given, name=_NAME, seconds=limit, is_idle=True))
        except InUseError as error:
            raise NotReadyError(
                f"{error} reads the slot {slot.name}: stop the connector (PUT /connectors/NAME/stop), and "
                "run the command again"
            ) from None
        except psycopg.Error as error:
            say(
                f"the slot {slot.name} cannot be held ({first_line(error)}): start its reader only after this"
            )
            yield None
            return
        yield pid


def _obstacle(connection: Connection, slot: slots.Slot) -> str | None:
    may = connection.execute(queries.MAY_READ_SLOTS).fetchone()
    if may is not None and not may[0]:
        return f"role {may[1]} may not read slots (ALTER ROLE {may[1]} REPLICATION)"
    return None if slot.plugin == slots.PLUGIN else f"it has the plugin {slot.plugin}"
