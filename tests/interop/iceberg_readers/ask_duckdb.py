"""Ask questions of an Iceberg table with DuckDB: `python ask_duckdb.py METADATA < QUESTIONS > ANSWERS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import duckdb
import duckdb_extension_avro
import duckdb_extension_iceberg


def main() -> None:
    connection = duckdb.connect()
    for each in (duckdb_extension_avro, duckdb_extension_iceberg):
        (extension,) = Path(each.__file__).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(
        f"CREATE VIEW events AS SELECT *, created_at::DATE AS event_date FROM iceberg_scan('{sys.argv[1]}')"
    )
    json.dump([connection.execute(sql).fetchall() for sql in json.load(sys.stdin)], sys.stdout, default=str)


main()
