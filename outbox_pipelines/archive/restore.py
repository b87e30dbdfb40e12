"""Brings an archived day back as a table, and proves it equal to its manifest.

Invariants:
- All or nothing: one transaction makes the table, fills it and compares it.
- A restored event is published already: its `tx` lies below every snapshot, no relay sends it again. To send
  it again, insert it into the outbox anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from io import BytesIO
from pathlib import Path
from typing import Final

import psycopg
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.archive import proof, queries, sums
from outbox_pipelines.archive.store import Store, key, open_store
from outbox_pipelines.database import Connection, first_line
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.partitions.calendar import bounds_of, leaf_of, working_at
from outbox_pipelines.schema import require_schema
from outbox_pipelines.settings import Settings

_PROGRESS_ROWS: Final = 500_000


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of it."""

    day: date
    table: str
    rows: int


def restore(
    settings: Settings, day: date, attach: bool = False, progress: Callable[[int], None] = lambda rows: None
) -> Restored:
    """Makes the table `outbox_restored_YYYYMMDD` from a day's file; or the partition that was dropped.

    Args:
        attach: as a part of the outbox again, closed as it was. For a day of this outbox that is dropped.
        progress: told how many rows are written, every half a million or so.

    Raises:
        NotReadyError: the day is not dropped, or the table is there already.
        SetupError: no archive is named, or the file is not what its manifest says.
        AwayError: the database or the archive does not answer.
    """
    store = open_store(settings)
    require_schema(settings)
    with working_at(settings, day) as connection:
        row = connection.execute(queries.KNOWN, {"day": day}).fetchone()
        state, manifest_sha256 = row or (None, None)
        if attach and state != "dropped":
            raise NotReadyError(
                f"{day} is {state or 'no day of this outbox'}: only a dropped one is attached"
            )
        if loaded := proof.load(store, day):
            manifest, _ = loaded
        else:
            raise SetupError(f"{store.url} (OUTBOX_ARCHIVE) has no {day}")
        found = proof.verify(store, day, manifest_sha256)
        if not found.equal:
            raise SetupError(f"{day} is not restored: {'; '.join(found.differences)}")
        table = leaf_of(day) if attach else f"outbox_restored_{day:%Y%m%d}"
        try:
            with connection.transaction():
                connection.execute(queries.of_leaf(queries.MAKE, table))
                _fill(connection, store, key(day, manifest.file), table, progress)
                if sums.of_table(connection, table) != manifest.buckets:
                    raise SetupError(f"{day} is not restored: the rows differ from the manifest, see the log")
                connection.execute(queries.of_leaf(queries.MADE, table))
                if attach:
                    _attach(connection, day)
        except psycopg.errors.DuplicateTable:
            raise NotReadyError(f"the table {table} is there already: drop it first") from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(f"{first_line(error)}: the role that owns the outbox restores") from None
        except psycopg.errors.LockNotAvailable:
            raise NotReadyError(f"{day} is not attached, the outbox is locked: run it again") from None
        return Restored(day, table, manifest.rows)


def _fill(
    connection: Connection, store: Store, name: str, table: str, progress: Callable[[int], None]
) -> None:
    with store.local(name) as file, connection.cursor() as cursor:
        columns = [column for column in queries.COLUMNS if column in _columns(file)]
        copy = queries.of_leaf(queries.COPY, table, columns=sql.SQL(", ").join(map(sql.Identifier, columns)))
        rows = 0
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet, cursor.copy(copy) as sink:
            for group in range(parquet.num_row_groups):
                some = parquet.read_row_group(group, columns=columns).select(columns)
                text = BytesIO()
                # Strings are quoted, so that '' and NULL differ.
                arrow_csv.write_csv(some, text, arrow_csv.WriteOptions(include_header=False))
                sink.write(text.getbuffer())
                before, rows = rows, rows + some.num_rows
                if before // _PROGRESS_ROWS < rows // _PROGRESS_ROWS:
                    progress(rows)


def _columns(file: Path) -> list[str]:
    names: list[str] = pq.read_schema(file).names
    return names


def _attach(connection: Connection, day: date) -> None:
    start, stop = map(sql.Literal, bounds_of(day))
    connection.execute(queries.of_leaf(queries.ATTACH_RESTORED, leaf_of(day), start=start, stop=stop))
    connection.execute(queries.RESTORED, {"day": day})
