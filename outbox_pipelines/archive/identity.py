"""Which archive an outbox has: a disk that is not mounted, or another outbox's archive, is not written to.

Invariants:
- An archive belongs to one outbox. Its identity is drawn once, stored in it, and kept by the outbox beside
  each day that is archived; copied with everything else, it is the same archive elsewhere.
- Only `adopt` changes what the outbox knows: a person says that another place is its archive.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal

import psycopg
from pydantic import BaseModel, ConfigDict, ValidationError

from outbox_pipelines.archive import queries
from outbox_pipelines.archive.manifest import Source, digest, now
from outbox_pipelines.archive.store import IDENTITY, Store, manifest_key, open_store
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.schema import require_schema
from outbox_pipelines.secret import first_line
from outbox_pipelines.settings import Settings


class Identity(BaseModel):
    """What `_outbox/archive.json` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    archive: uuid.UUID
    source: Source
    """The outbox that it belongs to."""
    made_at: datetime

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return self.model_dump_json(indent=1, by_alias=True).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Adopted:
    """What came of it."""

    archive: uuid.UUID
    days: int
    """Archived days of the outbox that it has."""
    missing: tuple[date, ...]
    """Archived days of the outbox that it does not have."""


def require(store: Store, connection: Connection) -> None:
    """`SetupError` where this place is not the archive that the outbox's days were archived into."""
    row = connection.execute(queries.KNOWN_ARCHIVE).fetchone()
    if row is None:
        return
    known, days = row
    found = _read(store)
    if found is not None and found.archive == known:
        return
    what = (
        "holds no archive (_outbox/archive.json is missing)"
        if found is None
        else f"holds another archive, of {found.source}"
    )
    raise SetupError(
        f"{store.url} (OUTBOX_ARCHIVE) {what}, but {days} days of this outbox are archived: mount the disk, "
        "or correct the setting. If you have moved the archive on purpose, run `outbox archive adopt`"
    )


def require_or_make(store: Store, connection: Connection) -> uuid.UUID:
    """The identity of the archive; drawn if the outbox has none yet and the place is free.

    Raises:
        SetupError: as `require`; the place is another outbox's, or has days already.
    """
    with _alone(connection):
        require(store, connection)
        found, source = _read(store), source_of(connection)
        if found is None:
            if store.days():
                raise SetupError(
                    f"{store.url} (OUTBOX_ARCHIVE) has archived days, but no _outbox/archive.json: put it "
                    "back. If the archive is this outbox's, run `outbox archive adopt`"
                )
            found = _make(store, source)
        elif found.source != source and connection.execute(queries.KNOWN_ARCHIVE).fetchone() is None:
            raise _others(store, found)
        return found.archive


def adopt(settings: Settings, force: bool = False) -> Adopted:
    """Makes the place of the settings the archive of this outbox, from now on.

    Args:
        force: also where archived days are missing there, or another outbox has made it: that one is refused
            from then on.

    Raises:
        NotReadyError: archived days are missing there.
        SetupError: another outbox has made it; no archive is named.
        UnavailableError: the database or the archive does not answer.
    """
    store = open_store(settings)
    require_schema(settings)
    with connect(settings, name="outbox archive adopt") as connection, _alone(connection):
        archived = connection.execute(queries.ARCHIVED_DAYS).fetchall()
        missing = tuple(day for day, known in archived if not _has(store, day, known))
        if missing and not force:
            raise NotReadyError(
                f"{store.url} (OUTBOX_ARCHIVE) lacks the manifests of {len(missing)} of {len(archived)} "
                f"archived days, {missing[0]} the first: copy them there, with their files. To go on without "
                "them, run `outbox archive adopt --force`"
            )
        try:
            found = _read(store)
        except SetupError:
            # To write a new one is what this is for.
            found = None
        source = source_of(connection)
        is_ours = found is not None and (found.source == source or bool(archived and not missing))
        if found is not None and not is_ours and not force:
            raise _others(store, found)
        if found is None or not is_ours:
            found = _make(store, source)
        try:
            connection.execute(queries.ADOPT, {"archive": found.archive})
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"{first_line(error)}: an archive is adopted by the owner of the outbox"
            ) from None
        return Adopted(found.archive, len(archived) - len(missing), missing)


def source_of(connection: Connection) -> Source:
    """Which outbox this is."""
    ((system, database, schema),) = connection.execute(queries.SOURCE)
    return Source(system_identifier=system, database=database, schema=schema)


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Two days that are archived at once must not draw two identities."""
    with connection.transaction():
        connection.execute(queries.LOCK_ARCHIVE)
        yield


def _read(store: Store) -> Identity | None:
    stored = store.read(IDENTITY)
    if stored is None:
        return None
    try:
        return Identity.model_validate_json(stored.content)
    except ValidationError as error:
        problem = error.errors()[0]
        what = ": ".join((*map(str, problem["loc"]), problem["msg"]))
        raise SetupError(
            f"{store.address(IDENTITY)} cannot be read: {what}. Put it back, or run `outbox archive adopt`, "
            "which writes a new one"
        ) from None


def _make(store: Store, source: Source) -> Identity:
    store.clear(IDENTITY.rsplit("/", 1)[-1])
    made = Identity(archive=uuid.uuid4(), source=source, made_at=now())
    store.write(IDENTITY, made.to_bytes(), store.read(IDENTITY))
    return made


def _has(store: Store, day: date, manifest_sha256: str) -> bool:
    stored = store.read(manifest_key(day))
    return stored is not None and digest(stored.content) == manifest_sha256


def _others(store: Store, found: Identity) -> SetupError:
    return SetupError(
        f"{store.url} (OUTBOX_ARCHIVE) is the archive of another outbox, {found.source}: name another "
        "place; each outbox needs one of its own. If this database was restored from that one, and that one "
        "writes no more, run `outbox archive adopt --force`"
    )
