"""Read an Iceberg table with polars: `python read_polars.py METADATA FILE` writes its rows there."""

from __future__ import annotations

import sys

import polars

polars.scan_iceberg(sys.argv[1]).sink_parquet(sys.argv[2])
