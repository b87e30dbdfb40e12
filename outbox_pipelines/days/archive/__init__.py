"""Closed days as Parquet files: written, proven, restored, queried.

Invariants:
- Importing this imports neither DuckDB nor pandas nor pyarrow: `open_archive` is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_pipelines.days.archive.data_set import Archive, open_archive

__all__ = ["Archive", "open_archive"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from outbox_pipelines.days.archive import data_set

        return getattr(data_set, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
