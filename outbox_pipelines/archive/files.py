"""The files of an archive in a bucket, for readers that know fsspec: DuckDB and pyarrow.

Invariants:
- Nothing can be written through it, and no file is seen but those that manifests name.
- A read of n bytes is one request of n bytes: sizes are known from the manifests, and nothing is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from outbox_pipelines.archive.store import Store

# A file never changes under its name, which is that of its content.
_WRITTEN: Final = datetime(2000, 1, 1, tzinfo=UTC)


class Files(AbstractFileSystem):  # type: ignore[misc]
    """A file system of keys, as `event_date=2026-11-21/events-….parquet`."""

    protocol = "outbox-archive"
    cachable = False

    def __init__(self, store: Store, sizes: Mapping[str, int]) -> None:
        """Of these keys, with their sizes in bytes."""
        super().__init__()
        self.store = store
        self._sizes = sizes

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Of a file.

        Raises:
            FileNotFoundError: no manifest names it.
        """
        name = self._strip_protocol(path)
        if name not in self._sizes:
            raise FileNotFoundError(path)
        return {"name": name, "size": self._sizes[name], "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The file itself: there are no directories."""
        found = self.info(path)
        return [found] if detail else [found["name"]]

    def modified(self, path: str) -> datetime:
        """The same for each: none ever is."""
        return _WRITTEN

    def _open(self, path: str, mode: str = "rb", **_: Any) -> AbstractBufferedFile:
        if mode != "rb":
            raise PermissionError(f"{path} is in the archive, which is only read")
        # Readers of Parquet know what they want next better than a cache does.
        return _File(self, path, mode, cache_type="none", size=self.info(path)["size"])


class _File(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.store.piece(self.path, start, end)  # type: ignore[no-any-return]
