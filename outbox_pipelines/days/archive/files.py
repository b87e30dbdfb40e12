"""The files of an archive in a bucket, for readers that use fsspec: DuckDB and pyarrow.

Invariants:
- It is read-only, and shows only files that manifests name.
- A read of n bytes is one request of n bytes: sizes come from the manifests, and nothing is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from outbox_pipelines.days.archive.store import Store

# A file never changes, because its name is derived from its content.
_WRITTEN: Final = datetime(2000, 1, 1, tzinfo=UTC)


class Files(AbstractFileSystem):  # type: ignore[misc]
    """A file system of keys such as `event_date=2026-11-21/events-….parquet`."""

    protocol = "outbox-archive"
    cachable = False

    def __init__(self, store: Store, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: the size of each key in bytes.
        """
        super().__init__()
        self.store = store
        self._sizes = sizes

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name, size and type of a file.

        Raises:
            FileNotFoundError: no manifest names it.
        """
        name = self._strip_protocol(path)
        if name not in self._sizes:
            raise FileNotFoundError(path)
        return {"name": name, "size": self._sizes[name], "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return the file itself: there are no directories."""
        found = self.info(path)
        return [found] if detail else [found["name"]]

    def modified(self, path: str) -> datetime:
        """Return the same time for each file: files never change."""
        return _WRITTEN

    def _open(self, path: str, mode: str = "rb", **_: Any) -> AbstractBufferedFile:
        if mode != "rb":
            raise PermissionError(f"{path} is in the archive, which is read-only")
        # Readers of Parquet know better than a cache which bytes they need next.
        return _File(self, path, mode, cache_type="none", size=self.info(path)["size"])


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.store.piece(self.path, start, end)  # type: ignore[no-any-return]
