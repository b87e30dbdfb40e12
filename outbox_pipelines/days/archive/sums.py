"""Compute sums of a day's rows, by buckets of `seq`: PostgreSQL for the table, DuckDB for the file.

Invariants:
- Too little memory is a separate error: it does not mean that the file is damaged.
- The memory for the sums of a file depends on its row groups, not on the day's size or the number of cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import queries
from outbox_pipelines.days.archive.columns import OWN, added, in_duckdb
from outbox_pipelines.days.archive.manifest import Column, Sum
from outbox_pipelines.errors import SetupError

# Each thread reads its own row group.
_THREADS: Final = 2
# Bytes for DuckDB, and a factor for each thread's row group and the texts computed from it.
_LEAST: Final = 200_000_000
_TIMES: Final = 8


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
    return connection.execute(queries.ADDED, {"leaf": name, "own": list(OWN)}).fetchall()


def of_table(connection: Connection, leaf: str, columns: Sequence[Column] = ()) -> dict[int, Sum]:
    """Return the sums of all rows of a partition.

    Args:
        columns: columns added by users, which are also summed.
    """
    connection.execute(queries.SUM_TUNE)
    rows = connection.execute(queries.of_leaf(queries.SUMS, leaf, extra=queries.texts(columns)))
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def of_file(
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
    rows = _read(in_duckdb(queries.FILE_SUMS, columns), file, {}, threads, memory)
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def rows_of_table(
    connection: Connection, leaf: str, bucket: int, columns: Sequence[Column] = ()
) -> list[tuple[str, int, int]]:
    """Return id, seq and digest of each row of a table's bucket."""
    parts = {"bucket": sql.Literal(bucket), "extra": queries.texts(columns)}
    return connection.execute(queries.of_leaf(queries.DIGESTS, leaf, **parts)).fetchall()


def rows_of_file(file: Path, bucket: int, columns: Sequence[Column] = ()) -> list[tuple[str, int, int]]:
    """Return id, seq and digest of each row of a file's bucket."""
    return _read(in_duckdb(queries.FILE_DIGESTS, columns), file, {"bucket": bucket}, _THREADS, None)


def _read(
    query: str, file: Path, given: dict[str, Any], threads: int, memory: int | None
) -> list[tuple[Any, ...]]:
    if memory is None:
        memory = _LEAST + threads * _TIMES * _largest_group(file)
    config: dict[str, Any] = {"memory_limit": f"{memory // 1_000_000}MB", "threads": threads}
    with (
        # DuckDB may spill rows to disk: use a directory that only this user can read.
        TemporaryDirectory(prefix="outbox-archive-") as spilled,
        duckdb.connect(config=config | {"temp_directory": spilled}) as connection,
    ):
        # A progress bar would be mixed with a command's output.
        connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
        try:
            return connection.execute(query, {"file": str(file), **given}).fetchall()
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
        found = pq.read_metadata(file)
    # DuckDB reports what is wrong with the file.
    except Exception:  # noqa: BLE001
        return 0
    return max((found.row_group(n).total_byte_size for n in range(found.num_row_groups)), default=0)
