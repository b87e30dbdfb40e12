"""Sums of a day's rows, by buckets of `seq`: of the table by PostgreSQL, of the file by DuckDB.

Invariants:
- Too little memory is an error of its own: it says nothing about the file.
- The memory that the file's sums take depends on its row groups, not on the day or the machine's cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.archive import queries
from outbox_pipelines.archive.columns import OWN, added, in_duckdb
from outbox_pipelines.archive.manifest import Column, Sum
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import SetupError
from outbox_pipelines.secret import first_line

# Each thread reads a row group of its own.
_THREADS: Final = 2
# DuckDB itself, and for each thread its row group as it is read, with the texts that are made of it.
_LEAST: Final = 200_000_000
_TIMES: Final = 8


class UnreadableError(Exception):
    """The file is no Parquet file, or a damaged one."""


class NoMemoryError(SetupError):
    """DuckDB has too little memory for a file; whether it equals its rows is not known."""


def added_columns(connection: Connection, leaf: str) -> tuple[Column, ...]:
    """The columns of a partition that users have added."""
    return added((name, type) for name, type, _ in _added(connection, leaf))


def computed_columns(connection: Connection, leaf: str) -> set[str]:
    """Those of them that PostgreSQL computes, and nobody writes."""
    return {name for name, _, is_computed in _added(connection, leaf) if is_computed}


def _added(connection: Connection, leaf: str) -> list[tuple[Any, ...]]:
    name = sql.Identifier(leaf).as_string(connection)
    return connection.execute(queries.ADDED, {"leaf": name, "own": list(OWN)}).fetchall()


def of_table(connection: Connection, leaf: str, columns: Sequence[Column] = ()) -> dict[int, Sum]:
    """Of all rows of a partition.

    Args:
        columns: of users; summed too.
    """
    connection.execute(queries.SUM_TUNE)
    rows = connection.execute(queries.of_leaf(queries.SUMS, leaf, extra=queries.texts(columns)))
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def of_file(
    file: Path, columns: Sequence[Column] = (), threads: int = _THREADS, memory: int | None = None
) -> dict[int, Sum]:
    """Of all rows of a Parquet file.

    Args:
        columns: of users; summed too.
        threads: that DuckDB may use.
        memory: that DuckDB may use, in bytes; what the largest row group needs by default.

    Raises:
        UnreadableError: DuckDB cannot read it.
        NoMemoryError: it needs more memory.
    """
    rows = _read(in_duckdb(queries.FILE_SUMS, columns), file, {}, threads, memory)
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def rows_of_table(
    connection: Connection, leaf: str, bucket: int, columns: Sequence[Column] = ()
) -> list[tuple[str, int, int]]:
    """Id, seq and digest of each row of a bucket."""
    parts = {"bucket": sql.Literal(bucket), "extra": queries.texts(columns)}
    return connection.execute(queries.of_leaf(queries.DIGESTS, leaf, **parts)).fetchall()


def rows_of_file(file: Path, bucket: int, columns: Sequence[Column] = ()) -> list[tuple[str, int, int]]:
    """The same of a file."""
    return _read(in_duckdb(queries.FILE_DIGESTS, columns), file, {"bucket": bucket}, _THREADS, None)


def _read(
    query: str, file: Path, given: dict[str, Any], threads: int, memory: int | None
) -> list[tuple[Any, ...]]:
    if memory is None:
        memory = _LEAST + threads * _TIMES * _largest_group(file)
    config: dict[str, Any] = {"memory_limit": f"{memory // 1_000_000}MB", "threads": threads}
    with (
        # Rows may be spilled: to where nobody else may enter.
        TemporaryDirectory(prefix="outbox-archive-") as spilled,
        duckdb.connect(config=config | {"temp_directory": spilled}) as connection,
    ):
        # A bar of progress would come among what a command prints.
        connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
        try:
            return connection.execute(query, {"file": str(file), **given}).fetchall()
        except duckdb.OutOfMemoryException as error:
            raise NoMemoryError(
                f"{file.name} cannot be compared: DuckDB may use {config['memory_limit']} of memory and "
                f"needs more ({first_line(error)}). Its row groups are too large: write it again with "
                "`outbox archive day DAY --again`"
            ) from None
        except duckdb.Error as error:
            raise UnreadableError(first_line(error)) from None


def _largest_group(file: Path) -> int:
    """In bytes, not compressed."""
    try:
        found = pq.read_metadata(file)
    # Whatever is wrong with the file, DuckDB says it.
    except Exception:  # noqa: BLE001
        return 0
    return max((found.row_group(n).total_byte_size for n in range(found.num_row_groups)), default=0)
