"""Ask questions of an Iceberg table with DuckDB: `python ask_duckdb.py METADATA < QUESTIONS > ANSWERS`.

Or `ask_duckdb.py URL` of a REST catalog, with the bearer token TOKEN.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import duckdb
import duckdb_extension_avro
import duckdb_extension_httpfs
import duckdb_extension_iceberg


def main() -> None:
    at = sys.argv[1]
    connection = duckdb.connect()
    for each in (duckdb_extension_avro, duckdb_extension_httpfs, duckdb_extension_iceberg):
        (extension,) = Path(each.__file__).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
    connection.execute("SET TimeZone = 'UTC'")
    table = f"iceberg_scan('{at}')"
    if at.startswith("http"):
        token, table = os.environ["TOKEN"], "lake.outbox.events"
        connection.execute(f"CREATE SECRET catalog (TYPE iceberg, TOKEN '{token}')")
        connection.execute(f"ATTACH '' AS lake (TYPE iceberg, ENDPOINT '{at}', SECRET catalog)")
    connection.execute(f"CREATE VIEW events AS SELECT *, created_at::DATE AS event_date FROM {table}")
    json.dump([connection.execute(sql).fetchall() for sql in json.load(sys.stdin)], sys.stdout, default=str)


main()
