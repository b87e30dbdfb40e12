"""Prove that a day's file and its rows are equal, or show where they differ.

Sums are taken by buckets of `seq`.

Invariants:
- The two sides are computed by different engines from different bytes: PostgreSQL from the table, DuckDB from
  the file in the archive. The manifest replaces neither side; it must agree with both.
- It writes nothing.
- Too little memory is a separate error: it does not mean that the file is damaged.
- The memory for the sums of a file depends on its row groups, not on the day's size or the number of cores.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import archive_sql
from outbox_pipelines.days.archive.manifest import (
    OWN,
    Change,
    Column,
    Manifest,
    Sum,
    added,
    in_duckdb,
    is_recorded,
    read_manifest,
)
from outbox_pipelines.days.archive.store import Store, key, manifest_key
from outbox_pipelines.errors import SetupError, UnavailableError

# Each thread reads its own row group.
_THREADS: Final = 2
# Bytes for DuckDB, and a factor for each thread's row group and the texts computed from it.
_LEAST: Final = 200_000_000
_TIMES: Final = 8
# Limits of the report; enough to see what is wrong.
_BUCKETS: Final = 3
_ROWS: Final = 10


class UnreadableError(Exception):
    """The file is not a Parquet file, or is damaged."""


class NoMemoryError(SetupError):
    """DuckDB has too little memory for a file; it is unknown whether file and rows are equal."""


def added_columns(connection: Connection, leaf: str) -> tuple[Column, ...]:
    """Return the columns of a partition that users have added."""
    return added((name, type) for name, type, _ in _added(connection, leaf))


def computed_columns(connection: Connection, leaf: str) -> set[str]:
    """Return the added columns that PostgreSQL generates, and that must not be written."""
    return {name for name, _, is_computed in _added(connection, leaf) if is_computed}


def _added(connection: Connection, leaf: str) -> list[tuple[Any, ...]]:
    name = sql.Identifier(leaf).as_string(connection)
    return connection.execute(archive_sql.ADDED, {"leaf": name, "own": list(OWN)}).fetchall()


def sums_of_table(connection: Connection, leaf: str, columns: Sequence[Column] = ()) -> dict[int, Sum]:
    """Return the sums of all rows of a partition.

    Args:
        columns: columns added by users, which are also summed.
    """
    connection.execute(archive_sql.SUM_TUNE)
    rows = connection.execute(archive_sql.of_leaf(archive_sql.SUMS, leaf, extra=archive_sql.texts(columns)))
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def sums_of_file(
    file: Path, columns: Sequence[Column] = (), threads: int = _THREADS, memory: int | None = None
) -> dict[int, Sum]:
    """Return the sums of all rows of a Parquet file.

    Args:
        columns: columns added by users, which are also summed.
        threads: the number of threads for DuckDB.
        memory: the memory for DuckDB in bytes; by default what the largest row group needs.

    Raises:
        UnreadableError: DuckDB cannot read it.
        NoMemoryError: it needs more memory.
    """
    rows = read_file(in_duckdb(archive_sql.FILE_SUMS, columns), file, {}, threads, memory)
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def rows_of_table(
    connection: Connection, leaf: str, bucket: int, columns: Sequence[Column] = ()
) -> list[tuple[str, int, int]]:
    """Return id, seq and digest of each row of a table's bucket."""
    parts = {"bucket": sql.Literal(bucket), "extra": archive_sql.texts(columns)}
    return connection.execute(archive_sql.of_leaf(archive_sql.DIGESTS, leaf, **parts)).fetchall()


def rows_of_file(file: Path, bucket: int, columns: Sequence[Column] = ()) -> list[tuple[str, int, int]]:
    """Return id, seq and digest of each row of a file's bucket."""
    return read_file(in_duckdb(archive_sql.FILE_DIGESTS, columns), file, {"bucket": bucket})


def read_file(
    query: str, file: Path, parameters: dict[str, Any], threads: int = _THREADS, memory: int | None = None
) -> list[tuple[Any, ...]]:
    """Return the result of a query of a Parquet file, which it reads as `$file`.

    Raises:
        UnreadableError, NoMemoryError: as `sums_of_file`.
    """
    if memory is None:
        memory = _LEAST + threads * _TIMES * _largest_group(file)
    config: dict[str, Any] = {"memory_limit": f"{memory // 1_000_000}MB", "threads": threads}
    with (
        # DuckDB may spill rows to disk: use a directory that only this user can read.
        TemporaryDirectory(prefix="outbox-archive-") as spilled,
        duckdb.connect(config=config | {"temp_directory": spilled}) as connection,
    ):
        try:
            return connection.execute(query, {"file": str(file), **parameters}).fetchall()
        except duckdb.OutOfMemoryException as error:
            raise NoMemoryError(
                f"{file.name} cannot be compared: DuckDB can use {config['memory_limit']} of memory and "
                f"needs more ({first_line(error)}). Its row groups are too large: write it again with "
                "`outbox archive day DAY --again`"
            ) from None
        except duckdb.Error as error:
            raise UnreadableError(first_line(error)) from None


def _largest_group(file: Path) -> int:
    """Return the uncompressed size of the largest row group in bytes."""
    try:
        metadata = pq.read_metadata(file)
    # DuckDB reports what is wrong with the file.
    except Exception:  # noqa: BLE001
        return 0
    return max((metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)), default=0)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof."""

    day: date
    rows: int
    """Rows of the table; of the manifest if there was no table."""
    differences: tuple[str, ...]
    """One line each; empty if proven equal."""
    changes: tuple[Change, ...] = ()
    """What has been changed since the day was archived, as its manifest says."""

    @property
    def equal(self) -> bool:
        return not self.differences


def prove(store: Store, day: date, connection: Connection, leaf: str, manifest_sha256: str | None) -> Proof:
    """Compare a partition with its file.

    Args:
        manifest_sha256: the manifest's digest in the database; None accepts any manifest.
    """
    manifest, differences = _manifest(store, day, manifest_sha256)
    in_table = added_columns(connection, leaf)
    # A column that was dropped from the table since is not a difference: the file has more data.
    names = {column.name for column in in_table}
    columns = (
        in_table if manifest is None else tuple(column for column in manifest.columns if column.name in names)
    )
    with ThreadPoolExecutor(1) as threads:
        summing = threads.submit(sums_of_table, connection, leaf, columns)
        sums, of_file = (None, []) if manifest is None else _file(store, manifest)
        table = summing.result()
    differences += of_file
    if manifest is not None:
        differences += _not_in_file(connection, leaf, in_table, manifest)
        if columns == manifest.columns:
            differences += _against_manifest("the rows", table, manifest)
        if sums is not None:
            with store.local(key(day, manifest.file)) as file:
                if columns != manifest.columns:
                    sums = sums_of_file(file, columns)
                if sums != table:
                    differences += _named(connection, leaf, file, columns, table, sums)
    changes = manifest.changes if manifest is not None else ()
    return Proof(day, sum(of_bucket.rows for of_bucket in table.values()), tuple(differences), changes)


def verify(store: Store, day: date, manifest_sha256: str | None) -> Proof:
    """Compare a file with its manifest, if the rows no longer exist."""
    manifest, differences = _manifest(store, day, manifest_sha256)
    if manifest is None:
        return Proof(day, 0, tuple(differences))
    return Proof(day, manifest.rows, (*differences, *_file(store, manifest)[1]), manifest.changes)


def require_unchanged(store: Store, day: date, manifest_sha256: str | None) -> Manifest:
    """Return the manifest of a day whose file has the size and the sha256 that it names.

    Args:
        manifest_sha256: as in `prove`.

    Raises:
        SetupError: manifest or file are missing or have changed.
        UnavailableError: the archive does not answer.
    """
    manifest, differences = _manifest(store, day, manifest_sha256)
    if manifest is not None and not differences:
        try:
            with store.local(key(day, manifest.file)) as file:
                differences = _bytes(file, manifest)
        except FileNotFoundError:
            differences = [f"{manifest.file} is missing in {store.url}"]
    if manifest is None or differences:
        raise SetupError(
            f"{'; '.join(differences)}: restore the archive (OUTBOX_ARCHIVE), and run "
            f"`outbox archive verify {day}`"
        )
    return manifest


def load(store: Store, day: date) -> tuple[Manifest, bytes] | None:
    """Return the manifest of a day and its bytes; None if the day has none.

    Raises:
        SetupError: it cannot be read, or belongs to another day.
    """
    stored = store.read(manifest_key(day))
    return None if stored is None else (read_manifest(stored.content, day), stored.content)


def _manifest(store: Store, day: date, manifest_sha256: str | None) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, and what is wrong with it."""
    try:
        loaded = load(store, day)
    except UnavailableError:
        raise
    except SetupError as error:
        return None, [str(error)]
    if loaded is None:
        return None, [f"{day} has no manifest in {store.url}"]
    manifest, stored = loaded
    if manifest_sha256 is not None and not is_recorded(stored, manifest_sha256):
        why = "its digest differs"
        if set(manifest_sha256.split()) & {change.manifest_sha256 for change in manifest.changes}:
            why = "it was changed since. If the database was restored, run `outbox archive adopt`"
        return manifest, [f"the manifest of {day} is not the one that was written: {why}"]
    return manifest, []


def _file(store: Store, manifest: Manifest) -> tuple[dict[int, Sum] | None, list[str]]:
    """Return the sums of the manifest's file, and how file and manifest differ."""
    try:
        with store.local(key(manifest.day, manifest.file)) as file:
            differences = _bytes(file, manifest)
            try:
                sums = sums_of_file(file, manifest.columns)
            except UnreadableError as error:
                return None, [*differences, f"{manifest.file} cannot be read: {error}"]
    except FileNotFoundError:
        return None, [f"{manifest.file} is missing in {store.url}"]
    return sums, differences + _against_manifest(manifest.file, sums, manifest)


def _not_in_file(
    connection: Connection, leaf: str, in_table: Sequence[Column], manifest: Manifest
) -> list[str]:
    """Return the columns with values that the file lacks, because they were added or renamed since."""
    in_file = {column.name for column in manifest.columns}
    differences = []
    for name in (column.name for column in in_table if column.name not in in_file):
        query = archive_sql.of_leaf(archive_sql.HAS_VALUES, leaf, name=sql.Identifier(name))
        if connection.execute(query).fetchall()[0][0]:
            differences.append(f"the rows have a column {name}, which {manifest.file} does not have")
    return differences


def _bytes(file: Path, manifest: Manifest) -> list[str]:
    size = file.stat().st_size
    if size != manifest.size:
        return [f"{manifest.file} has {size:,} bytes, not {manifest.size:,}"]
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != manifest.sha256:
        return [f"{manifest.file} has changed since it was written: its sha256 is {actual[:12]}…"]
    return []


def _against_manifest(what: str, sums: dict[int, Sum], manifest: Manifest) -> list[str]:
    rows = sum(of_bucket.rows for of_bucket in sums.values())
    differences = [] if rows == manifest.rows else [f"{what}: {rows:,}, in the manifest {manifest.rows:,}"]
    wrong = sorted(
        bucket for bucket in sums | manifest.buckets if sums.get(bucket) != manifest.buckets.get(bucket)
    )
    if wrong:
        differences.append(f"{what}: sums differ from the manifest's in the buckets {_some(wrong)}")
    return differences


def _named(
    connection: Connection,
    leaf: str,
    file: Path,
    columns: Sequence[Column],
    table: dict[int, Sum],
    sums: dict[int, Sum],
) -> list[str]:
    """Return the rows that differ between table and file, in the first buckets with differences."""
    wrong = sorted(bucket for bucket in table | sums if table.get(bucket) != sums.get(bucket))
    differences = [f"table and file differ in the buckets {_some(wrong)}"]
    for bucket in wrong[:_BUCKETS]:
        rows = Counter(rows_of_table(connection, leaf, bucket, columns))
        in_file = Counter(rows_of_file(file, bucket, columns))
        lines = _rows(list((rows - in_file).elements()), list((in_file - rows).elements()))
        differences += [f"bucket {bucket}: {line}" for line in lines[:_ROWS]]
        if len(lines) > _ROWS:
            differences.append(f"bucket {bucket}: and {len(lines) - _ROWS:,} more")
    return differences


def _rows(only_table: list[tuple[str, int, int]], only_file: list[tuple[str, int, int]]) -> list[str]:
    in_table = {(id, seq) for id, seq, _ in only_table}
    in_file = {(id, seq) for id, seq, _ in only_file}
    twice = Counter((id, seq) for id, seq, _ in only_file)
    lines = []
    for event in sorted(in_table | in_file, key=lambda event: event[1]):
        name = f"event {event[0]} (seq {event[1]})"
        if event not in in_file:
            lines.append(f"{name} is missing in the file")
        elif event not in in_table:
            lines.append(f"{name} is in the file {'once too often' if twice[event] == 1 else 'too often'}")
        else:
            lines.append(f"{name} differs")
    return lines


def _some(buckets: list[int]) -> str:
    shown = ", ".join(map(str, buckets[:_ROWS]))
    return shown if len(buckets) <= _ROWS else f"{shown} and {len(buckets) - _ROWS} more"
