"""Where the archive lies: a directory, or a bucket.

Beside `events/event_date=…/events-….parquet`, which any reader of Parquet takes for a data set, there is
`_outbox/`: manifests, the archive's identity, files that are being written, and files that were set aside.

Invariants:
- A key is written whole or not at all: through a temporary name, sync and rename, or in one conditional put.
- What is written into a directory is for those who `readers` names, whatever the umask is.
- A key is never overwritten by chance: whoever replaces it names what is there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Readers, Settings

EVENTS: Final = "events"
"""The data set: nothing but Parquet files, in a directory for each day."""
IDENTITY: Final = "_outbox/archive.json"
"""Which archive it is."""
# Apart from the events: some readers take every file below a directory, whatever its name.
_MANIFESTS: Final = "_outbox/manifests"
_WRITING: Final = "_outbox/writing"
_KEPT: Final = "_outbox/kept"
_FILE: Final = re.compile(r"events-[0-9a-f]{16}\.parquet")
_READERS: Final = 16
# Of files and directories, whatever the umask is: payloads are in them.
_MODES: Final[dict[Readers, tuple[int, int]]] = {
    "owner": (0o600, 0o700),
    "group": (0o640, 0o750),
    "everyone": (0o644, 0o755),
}
# What a bucket answers stands in XML, behind the request.
_ANSWER: Final = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and the version of it that was read."""

    content: bytes
    version: dict[str, str]
    """What the bucket calls it; empty in a directory."""


class Store:
    """One archive.

    Every method raises `UnavailableError` where the store does not answer or refuses.
    """

    def __init__(self, url: str, readers: Readers = "owner") -> None:
        self.url = url
        """As it was given."""
        self._file_mode, self._directory_mode = _MODES[readers]
        self.root: Path | None = None
        """Its directory, where it is one; made when it is first written to."""
        if "://" not in url or url.startswith("file://"):
            self.root = Path(url.removeprefix("file://")).expanduser().absolute()
        else:
            with self._errors():
                self._bucket: Any = obstore.store.from_url(url)

    def days(self) -> list[date]:
        """Those that have a manifest, in order."""
        return list(self.manifests())

    def manifests(self) -> dict[date, Stored]:
        """Of each day that has one, in order."""
        days = sorted(filter(None, map(_day_of, self._names(_MANIFESTS))))
        # A bucket takes tens of milliseconds for each.
        with ThreadPoolExecutor(_READERS if self.root is None else 1) as threads:
            found = threads.map(lambda day: self.read(manifest_key(day)), days)
            return {day: stored for day, stored in zip(days, found, strict=True) if stored is not None}

    def _names(self, directory: str) -> list[str]:
        """Of the objects in it."""
        with self._errors():
            if self.root is None:
                found = obstore.list_with_delimiter(self._bucket, directory)["objects"]
                return [each["path"].rsplit("/", 1)[-1] for each in found]
            path = self.root / directory
            return [each.name for each in path.iterdir()] if path.exists() else []

    def piece(self, name: str, start: int, end: int) -> bytes:
        """The bytes of an object in a bucket, from `start` to before `end`."""
        with self._errors():
            return bytes(obstore.get_range(self._bucket, name, start=start, end=end))

    def address(self, name: str) -> str:
        """Of an object: what a person or a reader may open."""
        return str(self.root / name) if self.root is not None else f"{self.url.rstrip('/')}/{name}"

    def read(self, name: str) -> Stored | None:
        """A small object; None where there is none."""
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
        """A small object: a new one, or in place of the version that was read.

        Raises:
            SetupError: somebody else has written it in between.
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
        """A local file that is complete becomes the object of this name, and is gone."""
        with self._errors():
            if self.root is not None:
                target = self.root / name
                self._make(target.parent)
                file.chmod(self._file_mode)
                _sync(file)
                file.replace(target)
                _sync(target.parent)
                return
            with file.open("rb") as stream:
                # The name is of its content: who has written it before us has written the same.
                obstore.put(self._bucket, name, stream)
            file.unlink()

    @contextmanager
    def workplace(self, day: date) -> Iterator[Path]:
        """A directory for files on their way to `adopt`: on the archive's own file system if it has one."""
        with self._errors():
            if self.root is None:
                with TemporaryDirectory(prefix="outbox-archive-") as temporary:
                    yield Path(temporary)
                return
            with self._beside(str(day)) as directory:
                yield directory

    @contextmanager
    def _beside(self, name: str) -> Iterator[Path]:
        """A directory on the archive's file system, where no reader looks; what a crash leaves is found."""
        assert self.root is not None
        parent = self.root / _WRITING
        self._make(parent)
        with TemporaryDirectory(prefix=f"{name}-", dir=parent) as temporary:
            yield Path(temporary)

    def _make(self, directory: Path) -> None:
        """With its parents, each of them as durable as what comes into it."""
        if not directory.exists():
            self._make(directory.parent)
            directory.mkdir(exist_ok=True)
            directory.chmod(self._directory_mode)
            _sync(directory.parent)

    def others(self, day: date, file: str) -> list[str]:
        """The keys of a day's files beside this one: they do not count, but readers of directories do."""
        names = [name for name in self._names(key(day, "")[:-1]) if _FILE.fullmatch(name) and name != file]
        return [key(day, name) for name in sorted(names)]

    def remove(self, name: str) -> None:
        """An object that is not needed any more."""
        with self._errors():
            if self.root is not None:
                (self.root / name).unlink()
            else:
                obstore.delete(self._bucket, name)

    def set_aside(self, day: date, name: str) -> str:
        """Moves a file to where no reader finds it; its new key."""
        # Not .parquet: some readers look everywhere.
        target = f"{_KEPT}/{day}/{name.rsplit('/', 1)[-1]}.kept"
        with self._errors():
            if self.root is not None:
                self._make((self.root / target).parent)
                (self.root / name).replace(self.root / target)
            else:
                obstore.rename(self._bucket, name, target)
        return target

    def clear(self, what: date | str) -> None:
        """Removes what crashes left of files of a day, or of this name. Only for who alone writes them."""
        if self.root is None:
            return
        for name in self._names(_WRITING):
            if name.startswith(str(what)):
                with self._errors():
                    shutil.rmtree(self.root / _WRITING / name)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """An object as a local file.

        Raises:
            FileNotFoundError: there is none.
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
        """False: there is none."""
        with self._errors(), path.open("wb") as file:
            try:
                for chunk in obstore.get(self._bucket, name).stream():
                    file.write(chunk)
            except FileNotFoundError:
                self._require_bucket(name)
                return False
        return True

    def _require_bucket(self, name: str) -> None:
        """A missing bucket answers like a missing object, but cannot be listed."""
        if self.root is None:
            obstore.list_with_delimiter(self._bucket, name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise UnavailableError(
                f"the archive {self.url} (OUTBOX_ARCHIVE) refuses: {_reason(error)}"
            ) from None


def open_store(settings: Settings) -> Store:
    """The archive of the settings.

    Raises:
        SetupError: none is named.
    """
    return Store(named(settings), settings.archive_readers)


def named(settings: Settings) -> str:
    """Where the settings say that it is.

    Raises:
        SetupError: they name none.
    """
    if not settings.archives:
        raise SetupError(
            "no archive is named: set OUTBOX_ARCHIVE to a directory, or to s3://bucket/path, gs://… or az://…"
        )
    return settings.archive


def key(day: date, name: str) -> str:
    """Of a file of a day."""
    return f"{EVENTS}/event_date={day}/{name}"


def manifest_key(day: date) -> str:
    """Of the manifest of a day."""
    return f"{_MANIFESTS}/{day}.json"


def _day_of(name: str) -> date | None:
    """The day of a manifest; None of what somebody else has put there."""
    try:
        day = date.fromisoformat(name.removesuffix(".json"))
    except ValueError:
        return None
    return day if name == f"{day}.json" else None


def _reason(error: Exception) -> str:
    answer = _ANSWER.search(str(error))
    return answer.group(1) if answer else first_line(error)


def _overtaken(name: str) -> SetupError:
    return SetupError(f"{name} was written by somebody else at the same time: run it again")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
