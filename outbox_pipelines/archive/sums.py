"""Sums of a day's rows, by buckets of `seq`: of the table by PostgreSQL, of the file by DuckDB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

from outbox_pipelines.archive import queries
from outbox_pipelines.archive.manifest import Sum
from outbox_pipelines.database import Connection

_MEMORY = "400MB"


class UnreadableError(Exception):
    """The file is no Parquet file, or a damaged one."""


def of_table(connection: Connection, leaf: str) -> dict[int, Sum]:
    """Of all rows of a partition."""
    connection.execute(queries.SUM_TUNE)
    rows = connection.execute(queries.of_leaf(queries.SUMS, leaf))
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def of_file(file: Path) -> dict[int, Sum]:
    """Of all rows of a Parquet file.

    Raises:
        UnreadableError: DuckDB cannot read it.
    """
    rows = _read(queries.FILE_SUMS, {"file": str(file)})
    return {bucket: Sum(count, int(total)) for bucket, count, total in rows}


def rows_of_table(connection: Connection, leaf: str, bucket: int) -> list[tuple[str, int, int]]:
    """Id, seq and digest of each row of a bucket."""
    return connection.execute(queries.of_leaf(queries.DIGESTS, leaf), {"bucket": bucket}).fetchall()


def rows_of_file(file: Path, bucket: int) -> list[tuple[str, int, int]]:
    """The same of a file."""
    return _read(queries.FILE_DIGESTS, {"file": str(file), "bucket": bucket})


def _read(query: str, given: dict[str, Any]) -> list[tuple[Any, ...]]:
    with duckdb.connect(config={"memory_limit": _MEMORY}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        try:
            return connection.execute(query, given).fetchall()
        except duckdb.Error as error:
            raise UnreadableError(str(error).splitlines()[0]) from None
