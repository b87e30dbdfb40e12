"""Read an Iceberg table with pyiceberg: `python read_pyiceberg.py METADATA FILE` writes its rows there."""

from __future__ import annotations

import sys

import pyarrow.parquet as pq
from pyiceberg.table import StaticTable

pq.write_table(StaticTable.from_metadata(sys.argv[1]).scan().to_arrow(), sys.argv[2])
