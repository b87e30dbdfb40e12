"""What the database knows of an archive: its identity, and the changes of its days.

Invariants:
- An archive belongs to one outbox: nothing is written to an unmounted disk, or another outbox's archive. Its
  identity is generated once, stored in the archive, and recorded by the outbox with each archived day. A
  complete copy of an archive has the same identity.
- Only `adopt` changes the recorded identity, when an operator moves the archive.
- The manifest of a changed day has the same chain of changes as the database. It is believed where it leads
  from what the database has.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Literal, NamedTuple

import psycopg
from pydantic import BaseModel, ConfigDict, ValidationError

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import Connection
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.archive import archive_sql
from outbox_pipelines.days.archive.manifest import (
    Change,
    Manifest,
    Source,
    digest,
    is_recorded,
    now,
    read_manifest,
)
from outbox_pipelines.days.archive.store import IDENTITY, Store, manifest_key, open_store
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import DaySettings


class Identity(BaseModel):
    """The content of `_outbox/archive.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    archive: uuid.UUID
    source: Source
    """The outbox that the archive belongs to."""
    made_at: datetime

    def to_bytes(self) -> bytes:
        """Return the stored form."""
        return self.model_dump_json(indent=1, by_alias=True).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Adopted:
    """The result of `adopt`."""

    archive: uuid.UUID
    days: int
    """Archived days of the outbox that the archive has."""
    missing: tuple[date, ...]
    """Archived days of the outbox that the archive does not have."""
    changed: tuple[date, ...] = ()
    """Days whose manifests say that they were changed, which the database, restored, did not know. It does
    now."""


def require(store: Store, connection: Connection) -> None:
    """Raise `SetupError` if this location is not the archive of the outbox's archived days."""
    row = connection.execute(archive_sql.KNOWN_ARCHIVE).fetchone()
    if row is None:
        return
    known, days = row
    marker = _read(store)
    if marker is not None and marker.archive == known:
        return
    what = (
        "has no archive (_outbox/archive.json is missing)"
        if marker is None
        else f"has another archive, of {marker.source}"
    )
    raise SetupError(
        f"{store.url} (OUTBOX_ARCHIVE) {what}, but this outbox has {counted(days, 'archived day')}: mount "
        "the disk, or correct the setting. If you moved the archive deliberately, run `outbox archive adopt`"
    )


def require_own(settings: DaySettings) -> None:
    """Raise `SetupError` if OUTBOX_ARCHIVE is not the archive of the outbox's archived days."""
    with connect_to_outbox(settings, name="outbox archive") as connection:
        require(open_store(settings), connection)


def require_or_make(store: Store, connection: Connection) -> uuid.UUID:
    """Return the identity of the archive; create it if the outbox has none yet and the location is free.

    Raises:
        SetupError: as `require`; the location belongs to another outbox, or already has days.
    """
    with _alone(connection):
        require(store, connection)
        marker, source = _read(store), source_of(connection)
        if marker is None:
            if store.days():
                raise SetupError(
                    f"{store.url} (OUTBOX_ARCHIVE) has archived days, but no _outbox/archive.json: restore "
                    "this file. If the archive belongs to this outbox, run `outbox archive adopt`"
                )
            marker = _make(store, source)
        elif marker.source != source and connection.execute(archive_sql.KNOWN_ARCHIVE).fetchone() is None:
            raise _others(store, marker)
        return marker.archive


def adopt(settings: DaySettings, force: bool = False) -> Adopted:
    """Make the location of the settings the archive of this outbox.

    Args:
        force: also if archived days are missing there, or the archive belongs to another outbox, which is
            rejected from then on.

    Raises:
        NotReadyError: archived days are missing there.
        SetupError: the archive belongs to another outbox; OUTBOX_ARCHIVE is not set.
        UnavailableError: the database or the archive does not answer.
    """
    store = open_store(settings)
    with connect_to_outbox(settings, name="outbox archive adopt") as connection, _alone(connection):
        archived = connection.execute(archive_sql.ARCHIVED_DAYS).fetchall()
        missing: list[date] = []
        unknown: list[tuple[Manifest, bytes]] = []
        for day, known in archived:
            stored = store.read(manifest_key(day))
            if stored is None or not is_recorded(stored.content, known):
                changed = None if stored is None else _changed(stored.content, day, known)
                if stored is None or changed is None:
                    missing.append(day)
                else:
                    unknown.append((changed, stored.content))
        if missing and not force:
            raise NotReadyError(
                f"{store.url} (OUTBOX_ARCHIVE) lacks the manifests of {len(missing)} of {len(archived)} "
                f"archived days, first {missing[0]}: copy them there, with their files. To continue without "
                "them, run `outbox archive adopt --force`"
            )
        try:
            marker = _read(store)
        except SetupError:
            # `adopt` replaces an unreadable identity.
            marker = None
        source = source_of(connection)
        is_ours = marker is not None and (marker.source == source or bool(archived and not missing))
        if marker is not None and not is_ours and not force:
            raise _others(store, marker)
        if marker is None or not is_ours:
            marker = _make(store, source)
        try:
            connection.execute(archive_sql.ADOPT, {"archive": marker.archive})
            for manifest, content in unknown:
                record_changes(connection, manifest, content)
                if not store.others(manifest.day, manifest.file):
                    connection.execute(archive_sql.FORMER_DELETED, {"day": manifest.day})
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"{first_line(error)}: only the owner of the outbox can adopt an archive"
            ) from None
        days = tuple(manifest.day for manifest, _ in unknown)
        return Adopted(marker.archive, len(archived) - len(missing), tuple(missing), days)


def source_of(connection: Connection) -> Source:
    """Return the identity of this outbox."""
    ((system, database, schema),) = connection.execute(archive_sql.SOURCE)
    return Source(system_identifier=system, database=database, schema=schema)


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Lock the identity: two days that are archived concurrently must not create two identities."""
    with connection.transaction():
        connection.execute(archive_sql.LOCK_ARCHIVE)
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
            f"{store.address(IDENTITY)} cannot be read: {what}. Restore it, or run `outbox archive adopt`, "
            "which writes a new one"
        ) from None


def _make(store: Store, source: Source) -> Identity:
    store.clear(IDENTITY.rsplit("/", 1)[-1])
    made = Identity(archive=uuid.uuid4(), source=source, made_at=now())
    store.write(IDENTITY, made.to_bytes(), store.read(IDENTITY))
    return made


def _changed(stored: bytes, day: date, recorded: str) -> Manifest | None:
    """Return the manifest of a day that, as it says, was changed since; None if it was not."""
    try:
        manifest = read_manifest(stored, day)
    except SetupError:
        return None
    if not set(recorded.split()) & {change.manifest_sha256 for change in manifest.changes}:
        return None
    return manifest


def _others(store: Store, marker: Identity) -> SetupError:
    return SetupError(
        f"{store.url} (OUTBOX_ARCHIVE) is the archive of another outbox, {marker.source}: choose another "
        "location; each outbox needs its own archive. If this database was restored from that one, and that "
        "one is no longer in use, run `outbox archive adopt --force`"
    )


class Recorded(NamedTuple):
    """A change as the database has it."""

    day: date
    former_deleted_at: datetime | None
    """None: the former file may still exist."""
    change: Change


def recorded_changes(settings: DaySettings) -> list[Recorded]:
    """Return all changes, in the order in which they were made.

    Raises:
        UnavailableError: the database does not answer.
    """
    with connect_to_outbox(settings, name="outbox archive changes") as connection:
        rows = connection.execute(archive_sql.CHANGES).fetchall()
    names = Change.model_fields
    return [
        Recorded(day, deleted_at, Change(**dict(zip(names, change, strict=True))))
        for day, deleted_at, *change in rows
    ]


def unfinished_changes(settings: DaySettings) -> list[date]:
    """Return the days of which a change was interrupted.

    Raises:
        UnavailableError: the database does not answer.
    """
    with connect_to_outbox(settings, name="outbox archive expire") as connection:
        return [day for (day,) in connection.execute(archive_sql.UNFINISHED)]


def record_changes(connection: Connection, manifest: Manifest, content: bytes) -> None:
    """Record in the database a manifest with changes, and all of its changes."""
    # Each change led to the manifest that the next one replaced.
    digests = [*(change.manifest_sha256 for change in manifest.changes[1:]), digest(content)]
    changes = [
        {**change.model_dump(), "names": list(change.names), "day": manifest.day, "led_to": led_to}
        for change, led_to in zip(manifest.changes, digests, strict=True)
    ]
    with connection.transaction():
        connection.cursor().executemany(archive_sql.CHANGE, changes)
        parameters = {"day": manifest.day, "events": manifest.rows, "digest": digests[-1]}
        connection.execute(archive_sql.CHANGED, parameters)
