"""Restore an archived day as a table, and prove it equal to its manifest.

Invariants:
- All or nothing: one transaction creates the table, fills it and compares it.
- A restored event counts as published: its `tx` is below every snapshot, so no relay publishes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from typing import Final

import psycopg
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import archive_sql, identity, proof
from outbox_pipelines.days.archive.manifest import Change, Manifest
from outbox_pipelines.days.archive.store import Store, key, open_store
from outbox_pipelines.days.partitions.calendar import bounds_of, leaf_of, working_at
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import DaySettings

_PROGRESS_ROWS: Final = 500_000


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `restore`."""

    day: date
    table: str
    rows: int
    changes: tuple[Change, ...] = ()
    """What had been changed since the day was archived: the rows are the changed ones."""


def restore(
    settings: DaySettings,
    day: date,
    attach: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> Restored:
    """Create the table `outbox_restored_YYYYMMDD`, or the dropped partition, from a day's file.

    Args:
        attach: attach the table to the outbox as a closed day; only for a dropped day of this outbox.
        progress: called about every 500,000 rows with the number of rows written.

    Raises:
        NotReadyError: the day is not dropped, or the table already exists.
        SetupError: OUTBOX_ARCHIVE is not set, or the file differs from its manifest.
        UnavailableError: the database or the archive does not answer.
    """
    store = open_store(settings)
    with working_at(settings, day) as connection:
        row = connection.execute(archive_sql.KNOWN, {"day": day}).fetchone()
        state, manifest_sha256 = row or (None, None)
        if attach and state != "dropped":
            raise NotReadyError(
                f"{day} is {state or 'not a day of this outbox'}: only a dropped day can be attached"
            )
        if loaded := proof.load(store, day):
            manifest, _ = loaded
        else:
            identity.require(store, connection)
            raise SetupError(f"{store.url} (OUTBOX_ARCHIVE) has no manifest of {day}")
        result = proof.verify(store, day, manifest_sha256)
        if not result.equal:
            raise SetupError(f"{day} is not restored: {'; '.join(result.differences)}")
        table = leaf_of(day) if attach else f"outbox_restored_{day:%Y%m%d}"
        try:
            with connection.transaction():
                connection.execute(archive_sql.of_leaf(archive_sql.MAKE, table))
                _add_columns(connection, table, manifest, attach)
                _fill(connection, store, manifest, table, progress)
                if proof.sums_of_table(connection, table, manifest.columns) != manifest.buckets:
                    raise SetupError(f"{day} is not restored: the rows differ from the manifest, see the log")
                connection.execute(archive_sql.of_leaf(archive_sql.MADE, table))
                if attach:
                    _attach(connection, day)
        except psycopg.errors.DuplicateTable:
            raise NotReadyError(f"the table {table} already exists: drop it first") from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"{first_line(error)}: only the role that owns the outbox can restore days"
            ) from None
        except psycopg.errors.IntegrityError as error:
            raise SetupError(
                f"{day} is not restored: its rows violate the outbox's constraints: {first_line(error)}"
            ) from None
        except psycopg.errors.LockNotAvailable:
            raise NotReadyError(f"{day} is not attached, the outbox is locked: run it again") from None
        return Restored(day, table, manifest.rows, manifest.changes)


def _add_columns(connection: Connection, table: str, manifest: Manifest, attach: bool) -> None:
    """Add the users' columns that the outbox had when the file was written and no longer has."""
    there = {column.name for column in proof.added_columns(connection, table)}
    lost = [column for column in manifest.columns if column.name not in there]
    if lost and attach:
        raise SetupError(
            f"{manifest.day} is not attached: it has the column {lost[0].name} ({lost[0].type}), which the "
            "outbox no longer has: add it, or restore the day as a table, without --attach"
        )
    for column in lost:
        ((exists,),) = connection.execute(archive_sql.TYPE_EXISTS, {"type": column.type})
        type = sql.SQL(column.type if exists else "text")
        connection.execute(
            archive_sql.of_leaf(archive_sql.ADD_COLUMN, table, name=sql.Identifier(column.name), type=type)
        )


def _fill(
    connection: Connection, store: Store, manifest: Manifest, table: str, progress: Callable[[int], None]
) -> None:
    computed = proof.computed_columns(connection, table)
    # The column's name in the table, and in the file.
    names = {name: name for name in archive_sql.COLUMNS}
    names |= {column.name: column.stored for column in manifest.columns if column.name not in computed}
    listed = sql.SQL(", ").join(map(sql.Identifier, names))
    copy = archive_sql.of_leaf(archive_sql.COPY, table, columns=listed)
    connection.execute(archive_sql.PRINT)
    rows = 0
    with (
        store.local(key(manifest.day, manifest.file)) as file,
        connection.cursor() as cursor,
        pq.ParquetFile(file, page_checksum_verification=True) as parquet,
        cursor.copy(copy) as sink,
    ):
        stored = [name for name in names.values() if name in parquet.schema_arrow.names]
        for group in range(parquet.num_row_groups):
            some = parquet.read_row_group(group, columns=stored).select(stored)
            text = BytesIO()
            # Strings are quoted to distinguish '' from NULL.
            arrow_csv.write_csv(some, text, arrow_csv.WriteOptions(include_header=False))
            sink.write(text.getbuffer())
            before, rows = rows, rows + some.num_rows
            if before // _PROGRESS_ROWS < rows // _PROGRESS_ROWS:
                progress(rows)


def _attach(connection: Connection, day: date) -> None:
    start, stop = map(sql.Literal, bounds_of(day))
    connection.execute(archive_sql.of_leaf(archive_sql.ATTACH_RESTORED, leaf_of(day), start=start, stop=stop))
    connection.execute(archive_sql.RESTORED, {"day": day})
