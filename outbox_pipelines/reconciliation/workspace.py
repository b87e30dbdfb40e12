"""A place on disk where ids are compared: DuckDB in a directory that is gone afterwards.

Invariants:
- DuckDB's memory is bounded: what is larger goes into the directory.
- The directory is removed at the end, whatever the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from outbox_pipelines.database import first_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import queries

_MEMORY: Final = "400MB"
# Each sorts and hashes within a share of that memory.
_THREADS: Final = 2


class Workspace:
    """The tables of one comparison."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def run(self, query: str, **given: Any) -> None:
        """A statement."""
        self._connection.execute(query, given or None)

    def add(self, query: str, batch: pa.Table | pa.RecordBatch) -> None:
        """A statement that reads `batch`."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        self._connection.register("batch", table)
        self._connection.execute(query)
        self._connection.unregister("batch")

    def rows(self, query: str, **given: Any) -> list[tuple[Any, ...]]:
        """All rows of an answer; for short ones."""
        return self._connection.execute(query, given or None).fetchall()

    def row(self, query: str, **given: Any) -> tuple[Any, ...]:
        """The one row of an answer."""
        (row,) = self.rows(query, **given)
        return row

    def chunks(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """An answer of any length, so many rows at once."""
        cursor = self._connection.cursor().execute(query)
        while rows := cursor.fetchmany(size):
            yield rows


@contextmanager
def workspace() -> Iterator[Workspace]:
    """An empty one.

    Raises:
        SetupError: there is no room for it.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="outbox-reconcile-") as directory,
            duckdb.connect(
                str(Path(directory) / "ids.duckdb"),
                config={
                    "memory_limit": _MEMORY,
                    "threads": _THREADS,
                    "temp_directory": str(Path(directory) / "spilled"),
                    "preserve_insertion_order": False,
                    "python_enable_replacements": False,
                },
            ) as connection,
        ):
            connection.execute(queries.TABLES)
            yield Workspace(connection)
    except (duckdb.IOException, duckdb.OutOfMemoryException, OSError) as error:
        raise SetupError(
            f"the ids cannot be compared in {tempfile.gettempdir()}: {first_line(error)}: "
            "give it some GB, or name another directory in TMPDIR"
        ) from None
