"""Closed days as Parquet files: written, proven, restored, queried."""
