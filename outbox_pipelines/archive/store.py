"""Where the archive lies: a directory, or a bucket.

Invariants:
- A key is written whole or not at all: through a temporary name, sync and rename, or in one conditional put.
- A key is never overwritten by chance: whoever replaces it names what is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

from outbox_pipelines.errors import AwayError, SetupError
from outbox_pipelines.settings import Settings

MANIFEST: Final = "manifest.json"
NOWHERE: Final = "none"
"""The setting that asks for retention without an archive."""
_PREFIX: Final = "event_date="


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and the version of it that was read."""

    content: bytes
    version: str | None


class Store:
    """One archive.

    Every method raises `AwayError` where the store does not answer or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        """As it was given."""
        self.root: Path | None = None
        """Its directory, where it is one."""
        if "://" not in url or url.startswith("file://"):
            self.root = Path(url.removeprefix("file://")).expanduser().absolute()
            self.root.mkdir(parents=True, exist_ok=True)
            self._store: Any = obstore.store.LocalStore(self.root)
        else:
            self._store = obstore.store.from_url(url)

    def days(self) -> list[date]:
        """Those that have a manifest, in order."""
        with self._errors():
            listed = obstore.list_with_delimiter(self._store)
            found = []
            for prefix in listed["common_prefixes"]:
                name = prefix.rstrip("/").rsplit("/", 1)[-1]
                if name.startswith(_PREFIX):
                    found.append(date.fromisoformat(name.removeprefix(_PREFIX)))
        return sorted(day for day in found if self.read(key(day, MANIFEST)) is not None)

    def read(self, name: str) -> Stored | None:
        """A small object; None where there is none."""
        with self._errors():
            try:
                got = obstore.get(self._store, name)
                return Stored(bytes(got.bytes()), got.meta.get("e_tag"))
            except (NotFoundError, FileNotFoundError):
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
            temporary = self.root / f"{name}.tmp"
            with temporary.open("wb") as file:
                file.write(content)
            self.adopt(temporary, name)
            return
        with self._errors():
            try:
                mode: Any = "create" if replaces is None else {"e_tag": replaces.version}
                obstore.put(self._store, name, content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                raise _overtaken(name) from None

    def adopt(self, file: Path, name: str) -> None:
        """A local file that is complete becomes the object of this name, and is gone."""
        if self.root is not None:
            target = self.root / name
            _sync(file)
            file.replace(target)
            _sync(target.parent)
            return
        with self._errors(), file.open("rb") as stream:
            # The name is of its content: who has written it before us has written the same.
            obstore.put(self._store, name, stream)
        file.unlink()

    @contextmanager
    def workplace(self, day: date) -> Iterator[Path]:
        """A directory for files on their way to `adopt`: on the archive's own file system if it has one."""
        if self.root is None:
            with TemporaryDirectory(prefix="outbox-archive-") as temporary:
                yield Path(temporary)
            return
        directory = self.root / key(day, "")
        directory.mkdir(parents=True, exist_ok=True)
        _sync(self.root)
        # Hidden, and in a directory of its own: no reader follows it, and what a crash left is found.
        with TemporaryDirectory(prefix=".writing-", dir=directory) as temporary:
            yield Path(temporary)

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
            with self._errors(), path.open("wb") as file:
                try:
                    for chunk in obstore.get(self._store, name).stream():
                        file.write(chunk)
                except NotFoundError:
                    raise FileNotFoundError(name) from None
            yield path

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise AwayError(f"the archive {self.url} (OUTBOX_ARCHIVE) refuses: {first}") from None


def open_store(settings: Settings) -> Store:
    """The archive of the settings.

    Raises:
        SetupError: none is named.
    """
    if settings.archive in ("", NOWHERE):
        raise SetupError(
            "no archive is named: set OUTBOX_ARCHIVE to a directory, or to s3://bucket/path, gs://… or az://…"
        )
    return Store(settings.archive)


def key(day: date, name: str) -> str:
    """Of an object of a day."""
    return f"{_PREFIX}{day}/{name}"


def _overtaken(name: str) -> SetupError:
    return SetupError(f"{name} was written by somebody else at the same time: run it again")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
