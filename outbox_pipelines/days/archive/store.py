"""The storage of an archive: a directory or a bucket.

`events/event_date=…/events-….parquet` is a data set for any reader of Parquet. `_outbox/` has the manifests,
the archive's identity, files that are being written, and replaced files that are kept.

Invariants:
- A key is written completely or not at all: by a temporary name, sync and rename, or by one conditional put.
- In a directory, files can be read by those whom `readers` names, regardless of the umask.
- A key is never overwritten by accident: a writer that replaces it passes the version that it read.
- `Files`, for readers that use fsspec (DuckDB, pyarrow), is read-only and shows only files that manifests
  name. A read of n bytes is one request of n bytes: sizes come from the manifests, and nothing is listed.
"""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import obstore
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from outbox_pipelines.config.types import Readers
from outbox_pipelines.core.files import reason, sync
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings

EVENTS: Final = "events"
"""The data set: only Parquet files, in one directory for each day."""
IDENTITY: Final = "_outbox/archive.json"
"""The identity of the archive."""
# Outside the data set: some readers read every file below a directory, regardless of its name.
_MANIFESTS: Final = "_outbox/manifests"
_WRITING: Final = "_outbox/writing"
_KEPT: Final = "_outbox/kept"
_FILE: Final = re.compile(r"events-[0-9a-f]{16}\.parquet")
_READERS: Final = 16
# Modes of files and directories, regardless of the umask, because they contain payloads.
_MODES: Final[dict[Readers, tuple[int, int]]] = {
    "owner": (0o600, 0o700),
    "group": (0o640, 0o750),
    "everyone": (0o644, 0o755),
}
# A file never changes, because its name is derived from its content.
_WRITTEN: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and the version of it that was read."""

    content: bytes
    version: dict[str, str]
    """The bucket's identifiers of the version; empty in a directory."""


class Store:
    """One archive.

    Every method raises `UnavailableError` if the store does not answer or reports an error.
    """

    def __init__(self, url: str, readers: Readers = "owner") -> None:
        self.url = url
        """The URL or path as configured."""
        self._file_mode, self._directory_mode = _MODES[readers]
        self.root: Path | None = None
        """The directory, None for a bucket; it is created by the first write."""
        if "://" not in url or url.startswith("file://"):
            self.root = Path(url.removeprefix("file://")).expanduser().absolute()
        else:
            with self._errors():
                self._bucket: Any = obstore.store.from_url(url)

    def days(self) -> list[date]:
        """Return the days that have a manifest, in order."""
        return list(self.manifests())

    def manifests(self) -> dict[date, Stored]:
        """Return the manifest of each day that has one, in order."""
        days = sorted(filter(None, map(_day_of, self._names(_MANIFESTS))))
        # A bucket takes tens of milliseconds for each read.
        with ThreadPoolExecutor(_READERS if self.root is None else 1) as threads:
            contents = threads.map(lambda day: self.read(manifest_key(day)), days)
            return {day: stored for day, stored in zip(days, contents, strict=True) if stored is not None}

    def days_of_files(self) -> set[date]:
        """Return the days that have a directory with files."""
        with self._errors():
            if self.root is None:
                prefixes = obstore.list_with_delimiter(self._bucket, EVENTS)["common_prefixes"]
                names = [prefix.rsplit("/", 1)[-1] for prefix in prefixes]
            else:
                names = [file.parent.name for file in (self.root / EVENTS).glob("*/*.parquet")]
        return set(filter(None, (_day_of(f"{name.partition('=')[2]}.json") for name in names)))

    def _names(self, directory: str) -> list[str]:
        """Return the names of the objects in a directory."""
        with self._errors():
            if self.root is None:
                objects = obstore.list_with_delimiter(self._bucket, directory)["objects"]
                return [entry["path"].rsplit("/", 1)[-1] for entry in objects]
            path = self.root / directory
            return [file.name for file in path.iterdir()] if path.exists() else []

    def piece(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object in a bucket, from `start` up to but excluding `end`."""
        with self._errors():
            return bytes(obstore.get_range(self._bucket, name, start=start, end=end))

    def address(self, name: str) -> str:
        """Return the address of an object: a path or a URL."""
        return str(self.root / name) if self.root is not None else f"{self.url.rstrip('/')}/{name}"

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        with self._errors():
            try:
                if self.root is not None:
                    return (self.root / name).stat().st_size
                return int(obstore.head(self._bucket, name)["size"])
            except FileNotFoundError:
                self._require_bucket(name)
                return None

    def read(self, name: str) -> Stored | None:
        """Return a small object; None if it does not exist."""
        with self._errors():
            try:
                if self.root is not None:
                    return Stored((self.root / name).read_bytes(), {})
                got = obstore.get(self._bucket, name)
                meta: Any = got.meta
                known = {what: meta[what] for what in ("e_tag", "version") if meta.get(what)}
                return Stored(bytes(got.bytes()), known)
            except FileNotFoundError:
                self._require_bucket(name)
                return None

    def write(self, name: str, content: bytes, replaces: Stored | None) -> None:
        """Write a small object: a new one, or a replacement of the version that was read.

        Raises:
            SetupError: another process has written it in between.
        """
        if self.root is not None:
            now = self.read(name)
            if (now and now.content) != (replaces and replaces.content):
                raise _overtaken(name)
            with self._errors(), self._beside(Path(name).name) as directory:
                file = directory / "object"
                file.write_bytes(content)
                self.adopt(file, name)
            return
        with self._errors():
            try:
                mode: Any = "create" if replaces is None else replaces.version
                obstore.put(self._bucket, name, content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                raise _overtaken(name) from None

    def adopt(self, file: Path, name: str) -> None:
        """Move a complete local file to the object of this name."""
        with self._errors():
            if self.root is not None:
                target = self.root / name
                self._make(target.parent)
                file.chmod(self._file_mode)
                sync(file)
                file.replace(target)
                sync(target.parent)
                return
            with file.open("rb") as stream:
                # The name is derived from the content: an earlier writer has written the same bytes.
                obstore.put(self._bucket, name, stream)
            file.unlink()

    @contextmanager
    def workplace(self, day: date) -> Iterator[Path]:
        """Create a temporary directory for files to `adopt`; a local archive uses its own file system."""
        with self._errors():
            if self.root is None:
                with TemporaryDirectory(prefix="outbox-archive-") as temporary:
                    yield Path(temporary)
                return
            with self._beside(str(day)) as directory:
                yield directory

    @contextmanager
    def _beside(self, name: str) -> Iterator[Path]:
        """Create a temporary directory outside the data set; `clear` removes what a crash leaves there."""
        assert self.root is not None
        parent = self.root / _WRITING
        self._make(parent)
        with TemporaryDirectory(prefix=f"{name}-", dir=parent) as temporary:
            yield Path(temporary)

    def directory(self, name: str) -> Path:
        """Create a directory of a local archive, and return it."""
        assert self.root is not None
        with self._errors():
            self._make(self.root / name)
        return self.root / name

    def _make(self, directory: Path) -> None:
        """Create a directory and its parents, and sync each of them."""
        if not directory.exists():
            self._make(directory.parent)
            directory.mkdir(exist_ok=True)
            # With it, what is created inside has the group of the archive.
            inherited = directory.stat().st_mode & stat.S_ISGID
            directory.chmod(self._directory_mode | inherited)
            sync(directory.parent)

    def others(self, day: date, file: str, *, foreign: bool = False) -> list[str]:
        """Return the keys of a day's other files: they are not valid, but readers of directories see them.

        Args:
            foreign: also Parquet files with names that no archive gives.
        """
        names = [name for name in self._names(key(day, "")[:-1]) if name != file]
        return [
            key(day, name)
            for name in sorted(names)
            if (name.endswith(".parquet") if foreign else _FILE.fullmatch(name))
        ]

    def remove(self, name: str) -> None:
        """Remove an object."""
        with self._errors():
            if self.root is not None:
                (self.root / name).unlink()
            else:
                obstore.delete(self._bucket, name)

    def remove_all(self, directory: str) -> None:
        """Remove all objects below a directory."""
        with self._errors():
            if self.root is not None:
                shutil.rmtree(self.root / directory)
                return
            for page in obstore.list(self._bucket, directory):
                obstore.delete(self._bucket, [entry["path"] for entry in page])

    def set_aside(self, day: date, name: str) -> str:
        """Move a file out of the data set, to `_outbox/kept`; return its new key."""
        # Not .parquet: some readers search all directories.
        target = f"{_KEPT}/{day}/{name.rsplit('/', 1)[-1]}.kept"
        self.rename(name, target)
        return target

    def kept(self, day: date) -> list[str]:
        """Return the addresses of the files of a day that were moved to `_outbox/kept`."""
        return [self.address(f"{_KEPT}/{day}/{name}") for name in sorted(self._names(f"{_KEPT}/{day}"))]

    def rename(self, name: str, target: str) -> None:
        """Give an object another name."""
        with self._errors():
            if self.root is not None:
                self._make((self.root / target).parent)
                (self.root / name).replace(self.root / target)
                sync((self.root / target).parent)
            else:
                obstore.rename(self._bucket, name, target)

    def clear(self, what: date | str) -> None:
        """Remove temporary files of a day or a name that crashes left. The caller is their only writer."""
        if self.root is None:
            return
        for name in self._names(_WRITING):
            if name.startswith(str(what)):
                with self._errors():
                    shutil.rmtree(self.root / _WRITING / name)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Provide an object as a local file.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        if self.root is not None:
            path = self.root / name
            if not path.is_file():
                raise FileNotFoundError(name)
            yield path
            return
        with TemporaryDirectory(prefix="outbox-archive-") as directory:
            path = Path(directory) / "object"
            if not self._download(name, path):
                raise FileNotFoundError(name)
            yield path

    def _download(self, name: str, path: Path) -> bool:
        """Download an object; return False if it does not exist."""
        with self._errors(), path.open("wb") as file:
            try:
                for chunk in obstore.get(self._bucket, name).stream():
                    file.write(chunk)
            except FileNotFoundError:
                self._require_bucket(name)
                return False
        return True

    def _require_bucket(self, name: str) -> None:
        """Raise an error if the bucket is missing: it answers like a missing object, but cannot be listed."""
        if self.root is None:
            obstore.list_with_delimiter(self._bucket, name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise UnavailableError(
                f"the archive {self.url} (OUTBOX_ARCHIVE) reports an error: {reason(error)}"
            ) from None


def open_store(settings: DaySettings) -> Store:
    """Open the archive of the settings.

    Raises:
        SetupError: OUTBOX_ARCHIVE is not set.
    """
    return Store(named(settings), settings.archive_readers)


def named(settings: DaySettings) -> str:
    """Return the location of the archive.

    Raises:
        SetupError: OUTBOX_ARCHIVE is not set.
    """
    if not settings.archives:
        raise SetupError(
            "no archive configured: set OUTBOX_ARCHIVE to a directory, s3://bucket/path, gs://… or az://…"
        )
    return settings.archive


def key(day: date, name: str) -> str:
    """Return the key of a file of a day."""
    return f"{EVENTS}/event_date={day}/{name}"


def manifest_key(day: date) -> str:
    """Return the key of the manifest of a day."""
    return f"{_MANIFESTS}/{day}.json"


def _day_of(name: str) -> date | None:
    """Return the day of a manifest; None for a foreign file."""
    try:
        day = date.fromisoformat(name.removesuffix(".json"))
    except ValueError:
        return None
    return day if name == f"{day}.json" else None


def _overtaken(name: str) -> SetupError:
    return SetupError(f"{name} was written by another process at the same time: run the command again")


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
        entry = self.info(path)
        return [entry] if detail else [entry["name"]]

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
