"""A place on disk where ids are compared: DuckDB in a directory that is gone afterwards.

Invariants:
- DuckDB's memory is bounded: what is larger goes into the directory.
- The directory is removed at the end, whatever the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pyarrow as pa

from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.secret import first_line

_CONFIG: Final[dict[str, Any]] = {
    "memory_limit": "400MB",
    # Each sorts and hashes within a share of that memory.
    "threads": 2,
    "preserve_insertion_order": False,
    "python_enable_replacements": False,
}


class Workspace:
    """The tables of one comparison. Every method raises `SetupError` where there is no room for them."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def run(self, query: str, **given: Any) -> None:
        """A statement."""
        with _room():
            self._connection.execute(query, given or None)

    def add(self, query: str, batch: pa.Table | pa.RecordBatch) -> None:
        """A statement that reads `batch`."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        self._connection.register("batch", table)
        self.run(query)
        self._connection.unregister("batch")

    def rows(self, query: str, **given: Any) -> list[tuple[Any, ...]]:
        """All rows of an answer; for short ones."""
        with _room():
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
    with _room():
        directory = TemporaryDirectory(prefix="outbox-reconcile-")
    with directory as place, duckdb.connect(str(Path(place) / "ids.duckdb"), config=_CONFIG) as connection:
        connection.execute("SET temp_directory = ?", [str(Path(place) / "spilled")])
        connection.execute(queries.TABLES)
        yield Workspace(connection)


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException, OSError) as error:
        raise SetupError(
            f"the ids cannot be compared on disk: {first_line(error)}: name a directory with "
            "some GB in TMPDIR"
        ) from None
