"""The rows of any table as a Parquet file of texts, and sums that prove both equal.

Invariants:
- The two sides of the proof are computed by different engines from different bytes, as for days: PostgreSQL
  from the table, DuckDB from the file in the archive.
- Every value is stored as PostgreSQL prints it: the file needs none of the types of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, LiteralString

from psycopg import sql

from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive.store import Store

_BATCH_ROWS: Final = 5_000
# With the length of each text: a separator in one text cannot shift into the next. NULL differs from ''.
_TEXT: Final[LiteralString] = "coalesce(length({name}::text) || '=' || {name}::text, '')"
_SUM: Final[LiteralString] = """
SELECT count(*), coalesce(sum(('x' || encode(substring(sha256(convert_to(concat_ws(chr(31), {texts}), 'UTF8'))
                                             FOR 7), 'hex'))::bit(56)::bigint), 0)
FROM {rows}"""
_FILE_SUM: Final = """
SELECT count(*), coalesce(sum(('0x' || substr(sha256(concat_ws(chr(31), {texts})), 1, 14))::BIGINT), 0)
FROM read_parquet($file)"""

Sum = tuple[int, int]
"""The number of rows, and the sum of their digests."""


def write(connection: Connection, columns: dict[str, str], rows: sql.Composable, file: Path) -> int:
    """Write rows into a local file; return how many.

    Args:
        columns: their types by their names.
        rows: what follows FROM.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([pa.field(name, pa.string()) for name in columns], metadata={"types": repr(columns)})
    texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in columns)
    query = sql.SQL("SELECT {} FROM {}").format(texts, rows)
    written = 0
    writer = pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)
    try:
        with connection.transaction(), connection.cursor("rows") as cursor:
            cursor.itersize = _BATCH_ROWS
            cursor.execute(query)
            while batch := cursor.fetchmany(_BATCH_ROWS):
                writer.write_batch(_batch(batch, schema))
                written += len(batch)
    except BaseException:
        # A closed writer has written a footer: an incomplete file would be valid.
        writer.close()
        file.unlink()
        raise
    writer.close()
    return written


def _batch(rows: Sequence[tuple[Any, ...]], schema: Any) -> Any:
    import pyarrow as pa

    columns = [pa.array(values, pa.string()) for values in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def sum_of_rows(connection: Connection, columns: dict[str, str], rows: sql.Composable) -> Sum:
    """Return the sum of rows in the database."""
    texts = [sql.SQL(_TEXT).format(name=sql.Identifier(name)) for name in columns]
    query = sql.SQL(_SUM).format(texts=sql.SQL(", ").join(texts), rows=rows)
    ((number, total),) = connection.execute(query)
    return int(number), int(total)


def sum_of_file(store: Store, name: str, columns: dict[str, str]) -> Sum | None:
    """Return the sum of a file's rows; None if it does not exist or cannot be read."""
    import duckdb

    quoted = ['"' + column.replace('"', '""') + '"' for column in columns]
    query = _FILE_SUM.replace("{texts}", ", ".join(_TEXT.replace("{name}", column) for column in quoted))
    try:
        with store.local(name) as file, duckdb.connect() as connection:
            connection.execute("SET threads = 2")
            row = connection.execute(query, {"file": str(file)}).fetchone()
    except (FileNotFoundError, duckdb.Error):
        return None
    assert row is not None
    return int(row[0]), int(row[1])
