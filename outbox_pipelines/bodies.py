"""The store of large payloads: a directory or a bucket with an object for each body.

    bodies = Bodies("s3://bucket/orders")                        # `pip install 'outbox-pipelines[bodies]'`
    emit(connection, "order", 1, "order.invoiced", bodies.large(invoice))
    consumer = Consumer(…, bodies=bodies)

Invariants:
- An object is complete, and in a directory synced to the disk, before an event refers to it.
- What is read has the size and the sha256 of its reference, or is an error.
- A missing object and an unavailable store are different errors: the second is over some time.
- No message has credentials or the query of a URL.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import obstore
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import LocalStore, from_url

from outbox_pipelines import Error
from outbox_pipelines.core.files import reason, sync
from outbox_pipelines.core.secret import redacted, register_variables
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer.content import LIMIT
from outbox_pipelines.writer.errors import BodyStoreError, OutboxError
from outbox_pipelines.writer.references import JSON, KEY, Body, LargePayload, Reference, is_json

_AT_ONCE: Final = 8
_REFUSED_NAME: Final = re.compile(r'Path "/?(.*?)"(?:: | contained )', re.DOTALL)
_OWNER: Final = "_outbox/bodies.json"
"""Whose bodies these are."""


class BodyError(Error):
    """The body of an event is missing, or is not the one that was written."""


class UnlistableError(BodyStoreError):
    """An object has a name that the client of buckets refuses; the message names it."""


class Bodies:
    """A store of large payloads, for `emit` and for `Consumer(bodies=…)`; can be used by several threads.

    Create it, or at least use it first, after the process has been forked.

    Args:
        url: a directory that exists, `s3://bucket/path` (with the usual `AWS_…` variables), `gs://…` or
            `az://…`. Each outbox has its own.
        above_bytes: JSON of up to this many bytes stays in the event; at most 1,000,000.
        on_unavailable: "fail" raises a `BodyStoreError` if the store is unavailable; "inline" writes JSON of
            up to 1,000,000 bytes into the event instead.
        timeout: seconds after which a request to a bucket fails; requests are repeated for as long again.

    Raises:
        SetupError: an argument is invalid, or the directory does not exist.
    """

    def __init__(
        self,
        url: str,
        *,
        above_bytes: int = 100_000,
        on_unavailable: Literal["fail", "inline"] = "fail",
        timeout: float = 10.0,
    ) -> None:
        register_variables()
        self.url: Final = redacted(url.partition("?")[0])
        """The store's address, without credentials."""
        if not isinstance(above_bytes, int) or not 0 <= above_bytes <= LIMIT:
            raise SetupError(f"above_bytes is {above_bytes!r}: give 0 to {LIMIT:,} bytes, as an int")
        if on_unavailable not in ("fail", "inline"):
            raise SetupError(f'on_unavailable is {on_unavailable!r}: give "fail" or "inline"')
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
            raise SetupError(f"timeout is {timeout!r}: give a number of seconds")
        self._above_bytes = above_bytes
        self._inlines = on_unavailable == "inline"
        self._root: Path | None = None
        """The directory; None for a bucket."""
        if "://" not in url or url.startswith("file://"):
            self._root = Path(url.removeprefix("file://")).expanduser().absolute()
            if not self._root.is_dir():
                raise SetupError(f"the store of large payloads {self._root} is no directory: create it")
            self._store: Any = LocalStore(self._root)
            return
        try:
            self._store = from_url(
                url,
                client_options={
                    "timeout": f"{timeout:g}s",
                    "connect_timeout": f"{min(timeout, 5):g}s",
                    # These options replace those of the environment.
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1"),
                },
                retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=timeout)},
            )
        except (BaseError, ValueError) as error:
            raise SetupError(
                f"the store of large payloads {self.url} cannot be opened: {reason(error)}: give a "
                "directory, s3://bucket/path, gs://… or az://…"
            ) from None

    def large(self, payload: object, content_type: str = JSON) -> LargePayload:
        """Return a payload for `emit` and `NewEvent`, which is stored as an object if it is large.

        Args:
            payload: what `emit` takes; or bytes, which are always stored.
            content_type: of the bytes, such as ``application/pdf``.

        Raises:
            OutboxError: bytes without their content type, or another object with one.
        """
        if isinstance(payload, bytearray | memoryview):
            payload = bytes(payload)
        if isinstance(payload, bytes) == is_json(content_type):
            raise OutboxError(
                "bytes need their content type: bodies.large(content, 'application/pdf')"
                if isinstance(payload, bytes)
                else f"a body of {content_type} is a {type(payload).__name__}: give bytes"
            )
        return LargePayload(self, payload, content_type, self._above_bytes)

    def put(self, day: str, bodies: Sequence[Body]) -> list[str]:
        """Store bodies of a day; return the payloads of their events, as JSON.

        Raises:
            BodyStoreError: the store is unavailable.
        """
        if len(bodies) == 1:
            return [self._put(day, bodies[0])]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [*threads.map(lambda each: self._put(day, each), bodies)]

    async def put_later(self, day: str, bodies: Sequence[Body]) -> list[str]:
        """As `put`, without blocking the event loop."""
        return await asyncio.to_thread(self.put, day, bodies)

    def _put(self, day: str, body: Body) -> str:
        reference = Reference(
            f"{day}/{uuid.uuid4().hex}",
            len(body.content),
            hashlib.sha256(body.content).hexdigest(),
            body.content_type,
        )
        try:
            with self._errors("store"):
                if self._root is None:
                    attributes: Any = {"Content-Type": body.content_type}
                    obstore.put(self._store, reference.key, body.content, attributes=attributes)
                else:
                    obstore.put(self._store, reference.key, body.content)
                    path = self._root / reference.key
                    for each in (path, path.parent, self._root):
                        sync(each)
        except BodyStoreError:
            if self._inlines and body.is_json and len(body.content) <= LIMIT:
                return str(body)
            raise
        return reference.payload()

    def get(self, reference: Reference) -> bytes:
        """Return the body of a reference.

        Raises:
            BodyError: it is missing, or differs from what was written.
            BodyStoreError: the store is unavailable.
        """
        with self._errors("read"):
            try:
                found = obstore.get(self._store, reference.key)
                size = found.meta["size"]
                content = bytes(found.bytes()) if size == reference.size else b""
            except FileNotFoundError:
                self._require_bucket(reference.key)
                raise BodyError(
                    f"the body {reference.key} is missing in {self.url}: restore the object, and replay the "
                    "event if it is a dead letter"
                ) from None
        if size != reference.size:
            differs = f"{size:,} bytes in place of {reference.size:,}"
        elif hashlib.sha256(content).hexdigest() != reference.sha256:
            differs = "another sha256"
        else:
            return content
        raise BodyError(
            f"the body {reference.key} in {self.url} has {differs}: restore the object as it was written, "
            "and replay the event if it is a dead letter"
        )

    def days(self, first: date, last: date) -> list[date]:
        """Return the days from `first` to `last` of which there may be objects, in order.

        Raises:
            BodyStoreError: the store is unavailable.
        """
        with self._errors("list"):
            found: Sequence[str]
            if self._root is not None:
                found = [each.name for each in self._root.iterdir() if each.is_dir()]
            else:
                try:
                    found = obstore.list_with_delimiter(self._store)["common_prefixes"]
                except InvalidPathError:
                    # Because of one name beside the days, which can be listed one by one.
                    return [first + timedelta(n) for n in range((last - first).days + 1)]
        return sorted(day for day in map(_day_of, found) if day is not None and first <= day <= last)

    def objects(self, day: date) -> dict[str, int]:
        """Return the bodies of a day, with their sizes in bytes by their keys; no object of another name.

        Raises:
            UnlistableError: a bucket has an object whose name prevents a list of this day.
            BodyStoreError: the store is unavailable.
        """
        with self._errors("list"):
            if self._root is not None:
                # The client refuses a whole directory because of one name.
                return dict(_files(self._root / str(day)))
            return {
                each["path"]: each["size"]
                for some in obstore.list(self._store, prefix=str(day))
                for each in some
                if KEY.fullmatch(each["path"])
            }

    def size_of(self, key: str) -> int | None:
        """Return the size of a body in bytes; None if it is missing.

        Raises:
            BodyStoreError: the store is unavailable.
        """
        with self._errors("read"):
            try:
                return obstore.head(self._store, key)["size"]
            except FileNotFoundError:
                self._require_bucket(key)
                return None

    def remove(self, keys: Sequence[str]) -> None:
        """Remove bodies, at most some hundreds at once.

        Raises:
            BodyStoreError: the store is unavailable.
        """
        with self._errors("remove"):
            if self._root is None:
                obstore.delete(self._store, keys)
                return
            for key in keys:
                (self._root / key).unlink(missing_ok=True)

    def owner(self) -> bytes | None:
        """Return what `own` has written; None if the store has no owner yet.

        Raises:
            BodyStoreError: the store is unavailable.
        """
        with self._errors("read"):
            try:
                return bytes(obstore.get(self._store, _OWNER).bytes())
            except FileNotFoundError:
                self._require_bucket(_OWNER)
                return None

    def own(self, content: bytes) -> None:
        """Record the owner of the store.

        Raises:
            BodyStoreError: the store is unavailable.
        """
        with self._errors("store"):
            obstore.put(self._store, _OWNER, content)

    def _require_bucket(self, key: str) -> None:
        """Raise an error if the bucket is missing: it answers like a missing object, but cannot be listed."""
        with suppress(InvalidPathError):
            obstore.list_with_delimiter(self._store, key.partition("/")[0])

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        _refuse_forked()
        try:
            if self._root is not None and not self._root.is_dir():
                raise NotADirectoryError("it is no directory: is its disk mounted?")
            yield
        except InvalidPathError as error:
            name = _REFUSED_NAME.search(str(error))
            raise UnlistableError(
                f"the store of large payloads {self.url} cannot be listed because of the name of "
                f"{name.group(1) if name else reason(error)!r}: rename or remove it"
            ) from None
        except (BaseError, OSError, NotImplementedError) as error:
            raise BodyStoreError(
                f"the store of large payloads {self.url} is unavailable ({action}): {reason(error)}"
            ) from None


_used_by: int | None = None
"""The process that has used a store: its threads do not exist in forks, where a request would never end."""


def _day_of(name: str) -> date | None:
    """Return the day that a directory is named after; None for another one."""
    try:
        day = date.fromisoformat(name)
    except ValueError:
        return None
    return day if name == str(day) else None


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the bodies in the directory of a day, and their sizes; none if it does not exist."""
    with suppress(FileNotFoundError):
        for each in directory.iterdir():
            key = f"{directory.name}/{each.name}"
            # A concurrent sweep may remove it.
            with suppress(FileNotFoundError):
                if KEY.fullmatch(key) and each.is_file():
                    yield key, each.stat().st_size


def _refuse_forked() -> None:
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise BodyStoreError(
            "this process was forked after a store of large payloads had been used, whose threads it lacks: "
            "use the store in the forked processes only"
        )
    _used_by = os.getpid()
