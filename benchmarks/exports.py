"""One export of a day in a process of its own: ``python -m benchmarks.exports WAY DSN DAY DIRECTORY``.

Prints rows, seconds and the peak memory of the process in MB. WAY: ours, csv (COPY to CSV, read by pyarrow),
or pandas (a server-side cursor).
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psycopg

from benchmarks import usage
from outbox_pipelines.days.partitions.calendar import leaf_of
from outbox_pipelines.settings import load_settings

_COLUMNS = "id, seq, aggregate_type, aggregate_id, event_type, payload, correlation_id, created_at"
_ORDER = "ORDER BY aggregate_type, aggregate_id, seq"
_ROWS_AT_ONCE = 50_000


def _ours(dsn: str, day: date, directory: Path) -> int:
    from outbox_pipelines.days.archive import day as archive

    return archive.archive(load_settings(dsn=dsn, archive=str(directory)), day).manifest.rows


def _csv(dsn: str, day: date, directory: Path) -> int:
    import pyarrow.csv
    import pyarrow.parquet

    text = directory / "rows.csv"
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor, text.open("wb") as file:
        query = f"COPY (SELECT {_COLUMNS} FROM {leaf_of(day)} {_ORDER}) TO STDOUT (FORMAT csv, HEADER)"
        with cursor.copy(query.encode()) as copy:
            for chunk in copy:
                file.write(chunk)
    rows = 0
    writer = None
    for batch in pyarrow.csv.open_csv(text):
        writer = writer or pyarrow.parquet.ParquetWriter(
            directory / "rows.parquet", batch.schema, compression="zstd"
        )
        writer.write_batch(batch)
        rows += batch.num_rows
    assert writer is not None
    writer.close()
    return rows


def _pandas(dsn: str, day: date, directory: Path) -> int:
    import pandas
    import pyarrow
    import pyarrow.parquet

    rows = 0
    writer = None
    with psycopg.connect(dsn) as connection, connection.cursor("export") as cursor:
        columns = _COLUMNS.replace("id,", "id::text,", 1).replace("payload", "payload::text")
        cursor.execute(f"SELECT {columns} FROM {leaf_of(day)} {_ORDER}".encode())
        while found := cursor.fetchmany(_ROWS_AT_ONCE):
            frame = pandas.DataFrame(found, columns=_COLUMNS.split(", "))
            table = pyarrow.Table.from_pandas(frame)
            writer = writer or pyarrow.parquet.ParquetWriter(
                directory / "rows.parquet", table.schema, compression="zstd"
            )
            writer.write_table(table)
            rows += len(found)
    assert writer is not None
    writer.close()
    return rows


def main() -> None:
    way, dsn, day = sys.argv[1], sys.argv[2], date.fromisoformat(sys.argv[3])
    with tempfile.TemporaryDirectory(dir=sys.argv[4]) as directory:
        started = time.perf_counter()
        rows = {"ours": _ours, "csv": _csv, "pandas": _pandas}[way](dsn, day, Path(directory))
        seconds = time.perf_counter() - started
    print(rows, seconds, usage.peak())


if __name__ == "__main__":
    main()
