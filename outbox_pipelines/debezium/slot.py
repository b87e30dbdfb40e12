"""The publication and the slot that a connector reads: checked, made and dropped.

Invariants:
- An object that someone else made is used only if it delivers each event completely; otherwise it is refused.
- A slot is dropped only if no session reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines import slot_reader
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.debezium import queries
from outbox_pipelines.debezium.router import columns, table
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import Settings

_FAILOVER_SINCE: Final = 170000

Say = Callable[[str], None]


def check_server(settings: Settings, connection: Connection, user: str) -> int:
    """Return the table's oid, if server, roles and table are fit for a slot.

    Args:
        user: the role that Debezium logs in as.

    Raises:
        SetupError: they are not; the message says what to run.
    """
    named = sql.Identifier(*table(settings)).as_string(connection)
    row = connection.execute(queries.FACTS, {"user": user, "table": named}).fetchone()
    assert row is not None
    wal_level, may_make, role, may_read, most, slots, oid = row
    if oid is None:
        raise SetupError(f"there is no table {named}: run `outbox migrate`, or correct OUTBOX_TABLE_FILE")
    if wal_level != "logical":
        raise SetupError(
            f"wal_level is {wal_level}, and slots need logical: run ALTER SYSTEM SET wal_level = 'logical', "
            "then restart PostgreSQL (a managed service has a parameter for it, often logical_replication)"
        )
    for name, may in ((role, may_make), (user, may_read)):
        if may is None:
            raise SetupError(f"there is no role {name}, as which Debezium is to log in: see --user")
        if not may:
            raise SetupError(
                f"the role {name} may not use slots: run ALTER ROLE {name} REPLICATION as a superuser (a "
                "managed service has a role for it, such as rds_replication)"
            )
    if slots >= most:
        raise SetupError(
            f"all {most} slots of the server exist (max_replication_slots): drop one that is not used "
            "(SELECT * FROM pg_replication_slots), or raise the setting and restart PostgreSQL"
        )
    return int(oid)


def check_no_pooler(settings: Settings) -> None:
    """Raise `SetupError` if OUTBOX_DSN leads to what cannot pass the replication protocol on."""
    try:
        with closing(connect(settings, name="outbox debezium", replication=True)) as connection:
            connection.execute("IDENTIFY_SYSTEM")
    except (UnavailableError, psycopg.Error) as error:
        raise SetupError(
            "the address in OUTBOX_DSN takes no replication connections, which Debezium needs: name the "
            "server itself instead of a pooler (OUTBOX_DSN, or --host and --port), and allow it in "
            f"pg_hba.conf ({error})"
        ) from None


def has_publication(settings: Settings, connection: Connection, publication: str, oid: int) -> bool:
    """Return whether the publication exists.

    Raises:
        SetupError: it exists and does not deliver each event completely.
    """
    given = {"publication": publication, "table": oid, "columns": list(columns(settings).values())}
    row = connection.execute(queries.PUBLICATION, given).fetchone()
    if row is None:
        return False
    inserts, via_root, has_table, missing, filters = row
    problem = (
        "does not publish inserts"
        if not inserts
        else "publishes partitions under their own names (publish_via_partition_root)"
        if not via_root
        else "does not have the table"
        if not has_table
        else f"leaves out the column {missing[0]}"
        if missing
        else "leaves out rows (WHERE)"
        if filters
        else None
    )
    if problem is not None:
        name = sql.Identifier(publication).as_string(connection)
        raise SetupError(
            f"the publication {publication} {problem}: run DROP PUBLICATION {name} if it is not needed "
            "elsewhere, and this command again"
        )
    return True


def make_publication(settings: Settings, connection: Connection, publication: str) -> None:
    """Make it, with inserts of the whole table under its own name."""
    connection.execute(
        sql.SQL(queries.MAKE_PUBLICATION).format(
            sql.Identifier(publication), sql.Identifier(*table(settings))
        )
    )


def drop_publication(connection: Connection, publication: str) -> None:
    """Drop it if it exists."""
    connection.execute(sql.SQL(queries.DROP_PUBLICATION).format(sql.Identifier(publication)))


def has_slot(connection: Connection, slot: str, *, is_read: bool) -> bool:
    """Return whether the slot exists.

    Args:
        is_read: whether the connector runs, so that a session may read it.

    Raises:
        SetupError: there is one of this name that the connector cannot read.
    """
    row = connection.execute(queries.SLOT, {"slot": slot}).fetchone()
    if row is None:
        return False
    database, plugin, _, is_lost = row
    if database != connection.info.dbname or plugin != "pgoutput":
        raise SetupError(
            f"the slot {slot} exists and is not this outbox's (database {database}, plugin {plugin}): choose "
            "another name with --slot, or drop it there"
        )
    if not is_read and (reader := slot_reader.await_end(connection, slot, seconds=slot_reader.LEAVE_SECONDS)):
        raise SetupError(
            f"{reader} reads the slot {slot} already, and a slot has one reader: stop what reads it, or "
            "choose another name with --slot"
        )
    if is_lost:
        raise SetupError(
            f"the slot {slot} is lost, since the server has removed its log: run `outbox debezium delete`, "
            "publish what was not sent with the relay (`outbox relay --until-empty`), and register again"
        )
    return True


def is_read(connection: Connection, slot: str) -> bool:
    """Return whether a session reads the slot."""
    row = connection.execute(queries.SLOT, {"slot": slot}).fetchone()
    return row is not None and row[2] is not None


def make_slot(connection: Connection, slot: str) -> None:
    """Make the slot; it begins when all transactions that run now have ended."""
    version = connection.info.server_version
    query = queries.MAKE_FAILOVER_SLOT if version >= _FAILOVER_SINCE else queries.MAKE_SLOT
    connection.execute(query, {"slot": slot})


def drop_slot(connection: Connection, slot: str, *, seconds: float) -> bool:
    """Drop the slot when no session reads it any more; return whether there was one.

    Raises:
        SetupError: it belongs to another database.
        NotReadyError: a session still reads it.
    """
    row = connection.execute(queries.SLOT, {"slot": slot}).fetchone()
    if row is None:
        return False
    if row[0] != connection.info.dbname:
        raise SetupError(f"the slot {slot} belongs to the database {row[0]}, and is not dropped")
    if reader := slot_reader.drop(connection, slot, seconds=seconds):
        raise NotReadyError(
            f"{reader} still reads the slot {slot}: run the command again when the connector's task has "
            "ended, or end it with SELECT pg_terminate_backend(…)"
        )
    return True
