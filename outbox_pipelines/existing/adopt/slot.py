"""The slot by which another program, such as Debezium, publishes the table that is adopted.

Invariants:
- What reads the slot has published everything that committed before a position in the log once the slot has
  confirmed that position: the program confirms what Kafka has acknowledged.
- On the way back the command holds the slot, so that its reader cannot start before the end. Nothing is read
  from it then, and nothing is confirmed. If the command ends, the server lets go of the slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection, slot_reader
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing.adopt import adopt_sql
from outbox_pipelines.existing.adopt.adopted_table import Facts, State
from outbox_pipelines.existing.adopt.renaming import Say
from outbox_pipelines.relay.read.slot.stream import InUseError, borrowed
from outbox_pipelines.settings import OutboxSettings

PLUGIN: Final = "pgoutput"
# Heartbeats alone are not enough: Debezium 3.3 confirms what its slot has delivered.
HEARTBEATS: Final = (
    "heartbeat.interval.ms and heartbeat.action.query, as `outbox debezium config` prints them"
)
FORGET: Final = (
    "before the connector starts again, set its snapshot.mode=no_data and remove its offsets (DELETE "
    "/connectors/NAME/offsets): otherwise it fails, or publishes all rows again"
)
_NAME: Final = "slot in OUTBOX_TABLE"
_SESSION: Final = "outbox adopt: slot"
_SHOW: Final = "SELECT slot_name, database, active FROM pg_replication_slots"


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot, as the server has it."""

    name: str
    database: str | None
    is_logical: bool
    plugin: str | None
    reader: int | None
    """The server's process that sends to the program."""
    lost: str | None
    """Why the server cannot deliver from it any more."""
    confirmed: str | None
    behind: int | None
    """The bytes of the log from what is confirmed to the position that was asked for."""

    @property
    def is_past(self) -> bool:
        """Whether everything before the position is confirmed."""
        return self.behind is not None and self.behind <= 0


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication that has the table."""

    name: str
    has_inserts: bool
    has_others: bool
    """Whether it has other tables, which the same slot may deliver."""
    has_ours: bool
    """Whether it has, or will have, the tables of the append-only outbox."""


def read(connection: Connection, name: str, lsn: str | None = None) -> Slot | None:
    """Return the slot; None if the server has none of this name.

    Args:
        lsn: the position for `behind`.
    """
    row = connection.execute(adopt_sql.SLOT, {"slot": name, "lsn": lsn}).fetchone()
    return None if row is None else Slot(name, *row)


def publications(connection: Connection, found: Facts, ours: str) -> list[Publication]:
    """Return the publications that have the table, the oldest first."""
    rows = connection.execute(adopt_sql.PUBLICATIONS, {"oid": found.oid, "ours": ours}).fetchall()
    return [Publication(*row) for row in rows]


def problem(connection: Connection, slot: Slot | None, name: str) -> str | None:
    """Return why no program can publish the table by this slot; None if one can."""
    if slot is None:
        return f"the server has no slot {name} ({_NAME}): name the one of the connector (slot.name); {_SHOW}"
    if not slot.is_logical:
        return f"the slot {name} ({_NAME}) is a physical one, which a standby reads: name another; {_SHOW}"
    if slot.database != connection.info.dbname:
        return (
            f"the slot {name} ({_NAME}) belongs to the database {slot.database}, and OUTBOX_DSN leads to "
            f"{connection.info.dbname}: correct one of them"
        )
    if slot.lost is not None:
        return (
            f"the slot {name} is lost ({slot.lost}), so its reader cannot publish what it has not delivered: "
            "see docs/from-debezium.md"
        )
    return None


def problems(connection: Connection, name: str, found: Facts, ours: str) -> list[str]:
    """Return what must be corrected before the switch."""
    slot = read(connection, name)
    if wrong := problem(connection, slot, name):
        return [wrong]
    assert slot is not None
    if slot.plugin == PLUGIN and not any(each.has_inserts for each in publications(connection, found, ours)):
        return [
            f"no publication has the inserts of {found}, so what reads the slot {name} does not publish "
            f"them: correct `slot` in OUTBOX_TABLE, or run ALTER PUBLICATION … ADD TABLE {found.quoted}"
        ]
    return []


def consequences(connection: Connection, name: str, found: Facts, ours: str) -> dict[str, str]:
    """Return what must be accepted: by its name."""
    return {
        f"publication:{each.name}": (
            f"publication {each.name} has all tables, also those of the append-only outbox in schema {ours}: "
            f"the connector must have table.include.list={found}, which names no table of {ours}. Otherwise "
            "it publishes new events as well, or fails at them"
        )
        for each in publications(connection, found, ours)
        if each.has_ours
    }


def notes(connection: Connection, name: str) -> list[str]:
    """Return what a person should know about the slot."""
    slot = read(connection, name)
    found = [
        f"what reads the slot {name} publishes events of before the switch; the relay of the outbox "
        "publishes later ones, when `outbox adopt drain` has found that nothing of before is missing"
    ]
    if slot is not None and slot.reader is None:
        found.append(f"no session reads the slot {name} now: start its connector, or `drain` has to wait")
    if slot is not None and slot.plugin != PLUGIN:
        found.append(
            f"the slot {name} has the plugin {slot.plugin}: `drain` can only wait for what its reader "
            "confirms"
        )
    if role := slot_reader.barred_role(connection):
        found.append(
            f"role {role} may not read slots: ALTER ROLE {role} REPLICATION, or `drain` can only wait "
            f"for what the reader of {name} confirms"
        )
    return found


def require_stopped(
    connection: Connection, state: State, *, holder: int | None = None, seconds: float = 0
) -> None:
    """Check that no session reads the slot on the way back, and that the connector can continue from it.

    A table without a slot needs no check.

    Args:
        holder: the server's process that holds the slot for this command; see `holding`.
        seconds: how long to wait for the end of a reader.

    Raises:
        NotReadyError: a session reads it.
        SetupError: nothing can continue from it, and nothing has changed yet.
    """
    if state.slot is None:
        return
    slot = read(connection, state.slot)
    if (slot is None or slot.lost is not None) and state.state == "adopted":
        drop_it = "" if slot is None else f"SELECT pg_drop_replication_slot('{state.slot}'); "
        raise SetupError(
            f"the slot {state.slot}, from which the connector is to continue, is "
            f"{'missing' if slot is None else 'lost'}. Nothing was written into the table since the switch: "
            f"run {drop_it}SELECT pg_create_logical_replication_slot('{state.slot}', '{PLUGIN}'), and "
            f"{FORGET}"
        )
    if slot is not None and slot.lost is None and (wrong := problem(connection, slot, state.slot)):
        raise SetupError(wrong)
    if holder is not None and (slot is None or slot.reader is None):
        raise NotReadyError(
            f"the server has ended the session that held the slot {state.slot}: keep the connector stopped, "
            "and run the command again"
        )
    is_ours = holder is not None and slot is not None and slot.reader == holder
    if not is_ours and (by := slot_reader.await_end(connection, state.slot, seconds=seconds)):
        raise NotReadyError(
            f"{by} reads the slot {state.slot}, and would publish new rows of {state} before the events of "
            "the outbox: stop the connector (PUT /connectors/NAME/stop), and run the command again"
        )


def next_step(connection: Connection, state: State) -> str:
    """Return what a person does after the way back."""
    assert state.slot is not None
    slot = read(connection, state.slot)
    if slot is None or slot.lost is not None:
        return (
            f"the slot {state.slot} is missing or lost: let the connector begin with a new one, and publish "
            f"the rows that {state} got since it has its name again"
        )
    return (
        f"start what reads the slot {state.slot}: it continues there. If the slot was moved (`drain --rest "
        f"publish`): {FORGET}"
    )


def drop(connection: Connection, state: State, found: Facts, ours: str) -> list[str]:
    """Drop the slot, unless other tables need it; return what was done.

    Raises:
        NotReadyError: a session reads it.
        SetupError: this role may not drop it.
    """
    assert state.slot is not None
    slot = read(connection, state.slot)
    if slot is None or slot.database != connection.info.dbname:
        return []
    if shared := [each.name for each in publications(connection, found, ours) if each.has_others]:
        return [
            f"the slot {state.slot} was not dropped, because publication {shared[0]} has other tables. If "
            f"nothing reads it any more: SELECT pg_drop_replication_slot('{state.slot}')"
        ]
    if role := slot_reader.barred_role(connection):
        raise SetupError(
            f"role {role} may not drop the slot {state.slot}: run ALTER ROLE {role} REPLICATION, or "
            f"SELECT pg_drop_replication_slot('{state.slot}') as another role, and the command again"
        )
    if by := slot_reader.drop(connection, state.slot, seconds=slot_reader.LEAVE_SECONDS):
        raise NotReadyError(
            f"{by} reads the slot {state.slot}: remove the connector (DELETE /connectors/NAME), and run the "
            "command again"
        )
    return [f"slot {state.slot} is dropped"]


@contextmanager
def held(
    settings: OutboxSettings, connection: Connection, state: State, found: Facts, say: Say
) -> Iterator[int | None]:
    """Hold the slot for the length of the block; yield the server's process that does.

    None: the table has no slot, or this role cannot hold it; then a line says what not to do.

    Raises:
        NotReadyError: another session reads it.
    """
    slot = None if state.slot is None else read(connection, state.slot)
    if slot is None or slot.lost is not None:
        yield None
        return
    if why := _obstacle(connection, slot):
        say(f"the slot {slot.name} cannot be held, because {why}: start its reader only after this command")
        yield None
        return
    having = publications(connection, found, settings.db_schema)
    # Without a publication of the table nothing is delivered, and the slot is held all the same.
    publication = having[0].name if having else slot.name
    given = (settings, connection, slot.name, publication)
    limit = slot_reader.LEAVE_SECONDS
    with ExitStack() as hold:
        try:
            _, pid = hold.enter_context(borrowed(*given, name=_SESSION, seconds=limit, is_idle=True))
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


def _obstacle(connection: Connection, slot: Slot) -> str | None:
    if role := slot_reader.barred_role(connection):
        return f"role {role} may not read slots (ALTER ROLE {role} REPLICATION)"
    return None if slot.plugin == PLUGIN else f"it has the plugin {slot.plugin}"
