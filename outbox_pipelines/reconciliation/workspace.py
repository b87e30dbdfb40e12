"""A DuckDB database in a temporary directory, in which ids are compared.

Invariants:
- DuckDB's memory is limited: larger data is written to the directory.
- The directory is always removed at the end, also after an error.
- Rows of PostgreSQL are streamed as batches: any number of rows with a few MB of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import adbc_driver_manager
import adbc_driver_postgresql
import adbc_driver_postgresql.dbapi
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql

from outbox_pipelines.core import session
from outbox_pipelines.core.files import replacing
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import reading_dsn
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.reconciliation import reconciliation_sql

_CONFIG: Final[dict[str, Any]] = {
    "memory_limit": "400MB",
    # Each thread sorts and hashes with a share of that memory.
    "threads": 2,
    "preserve_insertion_order": False,
    "python_enable_replacements": False,
}
_ROWS: Final = 100_000
_BATCH_BYTES: Final = 8_000_000
Read = Callable[[sql.Composable], Iterator[pa.RecordBatch]]
"""Returns the rows of a query in non-empty batches; one query at a time."""


class Workspace:
    """The tables of one comparison. Every method raises `SetupError` if the disk is full."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def run(self, query: str, **given: Any) -> None:
        """Run a statement."""
        with room():
            self._connection.execute(query, given or None)

    def add(self, query: str, batch: pa.Table | pa.RecordBatch) -> None:
        """Run a statement that reads `batch`."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        self._connection.register("batch", table)
        self.run(query)
        self._connection.unregister("batch")

    def table(self, query: str, batch: pa.Table) -> pa.Table:
        """Return the result of a query that reads `batch`."""
        self._connection.register("batch", batch)
        with room():
            found = self._connection.sql(query).to_arrow_table()
        self._connection.unregister("batch")
        return found

    def attach(self, kind: str, files: Sequence[Path]) -> None:
        """Make a view of the rows in these files, with the columns of their kind."""
        types = reconciliation_sql.COLUMNS[kind].items()
        if not files:
            nulls = ", ".join(f'NULL::{type} AS "{name}"' for name, type in types)
            self.run(reconciliation_sql.EMPTY.format(name=kind, columns=nulls))
            return
        columns = ", ".join(f'"{name}"::{type} AS "{name}"' for name, type in types)
        names = ", ".join(f"'{str(file).replace(chr(39), chr(39) * 2)}'" for file in files)
        self.run(reconciliation_sql.VIEW.format(name=kind, columns=columns, files=f"[{names}]"))

    def batches(self, query: str, **given: Any) -> Iterator[pa.RecordBatch]:
        """Yield a result of any length; other statements can run in between."""
        with room():
            yield from self._connection.cursor().sql(query, params=given or None).to_arrow_reader(_ROWS)

    def rows(self, query: str, **given: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a short result."""
        with room():
            return self._connection.execute(query, given or None).fetchall()

    def row(self, query: str, **given: Any) -> tuple[Any, ...]:
        """Return the only row of a result."""
        (row,) = self.rows(query, **given)
        return row

    def write(self, query: str, file: Path) -> None:
        """Write a result of any length to a Parquet file."""
        with room():
            reader = self._connection.sql(query).to_arrow_reader(_ROWS)
        with (
            replacing(file) as begun,
            pq.ParquetWriter(begun, reader.schema, compression="zstd") as writer,
        ):
            for batch in reader:
                writer.write_batch(batch)

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
    with room():
        directory = TemporaryDirectory(prefix="outbox-reconcile-")
    with directory as place, duckdb.connect(str(Path(place) / "ids.duckdb"), config=_CONFIG) as connection:
        connection.execute("SET temp_directory = ?", [str(Path(place) / "spilled")])
        connection.execute(reconciliation_sql.TABLES)
        yield Workspace(connection)


@contextmanager
def room() -> Iterator[None]:
    """Convert an error of a full disk or too little memory into a `SetupError`."""
    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException, OSError) as error:
        raise SetupError(
            f"the ids cannot be compared on disk: {first_line(error)}: set TMPDIR to a directory with "
            "a few GB of free space"
        ) from None


@contextmanager
def reading(dsn: str, schema: str) -> Iterator[Read]:
    """Open a connection to read from.

    Raises:
        UnavailableError: the database is unavailable or reports an error.
    """
    hint = {adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
    try:
        with (
            adbc_driver_postgresql.dbapi.connect(reading_dsn(dsn), autocommit=True) as connection,
            connection.cursor(adbc_stmt_kwargs=hint) as cursor,
        ):

            def read(query: sql.Composable) -> Iterator[pa.RecordBatch]:
                cursor.execute(query.as_string())
                return (batch for batch in cursor.fetch_record_batch() if batch.num_rows)

            for statement in [*session.pin_own(schema), *reconciliation_sql.TUNE.split(";")]:
                cursor.execute(statement)
            yield read
    # A server that ends the connection between two batches is an OSError.
    except (adbc_driver_manager.Error, OSError) as error:
        raise UnavailableError(f"the database ended the query of ids: {first_line(error)}") from None
