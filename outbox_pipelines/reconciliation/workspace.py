"""A DuckDB database in a temporary directory, in which ids are compared.

Invariants:
- DuckDB's memory is limited: larger data is written to the directory.
- The directory is always removed at the end, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import queries

_CONFIG: Final[dict[str, Any]] = {
    "memory_limit": "400MB",
    # Each thread sorts and hashes with a share of that memory.
    "threads": 2,
    "preserve_insertion_order": False,
    "python_enable_replacements": False,
}
_ROWS: Final = 100_000


class Workspace:
    """The tables of one comparison. Every method raises `SetupError` if the disk is full."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def run(self, query: str, **given: Any) -> None:
        """Run a statement."""
        with _room():
            self._connection.execute(query, given or None)

    def add(self, query: str, batch: pa.Table | pa.RecordBatch) -> None:
        """Run a statement that reads `batch`."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        self._connection.register("batch", table)
        self.run(query)
        self._connection.unregister("batch")

    def rows(self, query: str, **given: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a short result."""
        with _room():
            return self._connection.execute(query, given or None).fetchall()

    def row(self, query: str, **given: Any) -> tuple[Any, ...]:
        """Return the only row of a result."""
        (row,) = self.rows(query, **given)
        return row

    def write(self, query: str, file: Path) -> None:
        """Write a result of any length to a Parquet file."""
        with _room():
            reader = self._connection.sql(query).to_arrow_reader(_ROWS)
        try:
            with pq.ParquetWriter(file, reader.schema, compression="zstd") as writer:
                for batch in reader:
                    writer.write_batch(batch)
        except OSError as error:
            raise SetupError(f"{file} cannot be written: {first_line(error)}") from None

    def chunks(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield a result of any length in chunks of this many rows."""
        cursor = self._connection.cursor().execute(query)
        while rows := cursor.fetchmany(size):
            yield rows


@contextmanager
def workspace() -> Iterator[Workspace]:
    """Create an empty workspace.

    Raises:
        SetupError: the disk is full.
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
            f"the ids cannot be compared on disk: {first_line(error)}: set TMPDIR to a directory with "
            "a few GB of free space"
        ) from None
