"""One clean-up: months that can be dropped, then the rows that remain.

Invariants:
- At most one runs for a table. It can be killed anywhere, and the next one continues.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from psycopg import sql

from outbox_pipelines.database import Connection, connect, refuse_standby
from outbox_pipelines.days.archive.store import open_store
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.cleaning import archiving, months, queries, rows, target
from outbox_pipelines.existing.cleaning.target import Target
from outbox_pipelines.existing.existing_sql import PARTMAN
from outbox_pipelines.settings import NO_ARCHIVE, Settings

_LOCK: Final = 0x6F62_7805


@dataclass(slots=True)
class Cleaned:
    """What a clean-up did."""

    table: str
    deleted: int = 0
    """Rows, without those of dropped partitions."""
    dropped: list[str] = field(default_factory=list)
    """Partitions."""
    files: list[str] = field(default_factory=list)
    """Files of the archive."""
    notes: list[str] = field(default_factory=list)
    """What stays and why, and what should be corrected; a line each."""
    longest: float = 0.0
    """Seconds of the longest batch."""


def clean(settings: Settings, stop: threading.Event | None = None) -> Cleaned:
    """Remove the rows of OUTBOX_TABLE's table that were published OUTBOX_CLEAN_AFTER_HOURS ago.

    Raises:
        SetupError: the table cannot be cleaned, or the clean-up is not configured.
        NotReadyError: another clean-up of the table runs; rows and archive differ.
    """
    stop = stop or threading.Event()
    with connect(settings, name="outbox table clean") as connection:
        connection.execute(queries.TUNE)
        refuse_standby(connection)
        found = target.find(connection, settings)
        _lock(connection, found)
        store = None if settings.archive == NO_ARCHIVE else open_store(settings)
        cleaned = Cleaned(str(found), notes=_partman(connection, found))
        deleter = rows.Deleter(connection, found, stop)
        if store is not None:
            cleaned.files += archiving.complete(deleter, store)
        gone = months.drop_all(connection, found, store, stop)
        cleaned.dropped = gone.dropped
        cleaned.files += gone.files
        cleaned.notes += gone.kept
        if store is None:
            rows.delete_all(deleter)
        else:
            cleaned.files += archiving.archive_all(deleter, store)
        cleaned.deleted, cleaned.longest = deleter.deleted, deleter.longest
        return cleaned


def _lock(connection: Connection, found: Target) -> None:
    if (who := queries.LOCK.take(connection, {"key": _LOCK << 32 | found.oid})) is not None:
        raise NotReadyError(f"{found} is being cleaned by {who}: wait for its end")


def _partman(connection: Connection, found: Target) -> list[str]:
    """Return what in the settings of pg_partman would lose events."""
    notes = []
    ((children,),) = connection.execute(queries.CHILDREN, {"oid": found.oid}).fetchall()
    if children:
        notes.append(
            f"{children:,} tables inherit from {found}, and their rows stay: only declarative partitions are "
            "cleaned (pg_partman: the type native)"
        )
    row = connection.execute(PARTMAN).fetchone()
    if row is None:
        return notes
    if not row[1]:
        return [*notes, f"this role may not read {row[0]}: make sure that {found} has no retention there"]
    config = sql.SQL(row[0])
    name = sql.Literal(str(found)).as_string()
    for retention, is_infinite in connection.execute(
        sql.SQL(queries.RETENTION).format(config=config), {"table": str(found)}
    ).fetchall():
        if retention is not None:
            notes.append(
                f"pg_partman drops months of {found} by its retention ({retention}), also with rows that are "
                f"not published: UPDATE {row[0]} SET retention = NULL WHERE parent_table = {name}"
            )
        if not is_infinite:
            notes.append(
                f"pg_partman makes no months of {found} while no rows arrive, and later rows would go to the "
                f"default partition: UPDATE {row[0]} SET infinite_time_partitions = true "
                f"WHERE parent_table = {name}"
            )
    return notes
