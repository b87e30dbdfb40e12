"""Archive a closed day, and prove it.

Invariants:
- A day has one valid file: the one that its manifest names. The manifest is written last, and the database
  keeps its digest.
- Only one process at a time works on a day. A day that is already archived does not change.
- A file with rows that the table does not have is never removed: it is moved to `_outbox/kept`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import archive_sql, identity, proof
from outbox_pipelines.days.archive.manifest import (
    VERSION,
    Manifest,
    Sum,
    digest,
    is_recorded,
    read_manifest,
    schema_with,
)
from outbox_pipelines.days.archive.proof import Proof
from outbox_pipelines.days.archive.store import Store, Stored, key, manifest_key, open_store
from outbox_pipelines.days.partitions import close
from outbox_pipelines.days.partitions.calendar import attachment_of, leaf_of, require_day, working_at
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import DaySettings, OutboxSettings

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of `archive`."""

    manifest: Manifest
    written: bool
    """False if the day was already archived."""
    address: str
    """The path or URL of the file."""


def archive(
    settings: DaySettings,
    day: date,
    progress: Callable[[int], None] = lambda rows: None,
    again: bool = False,
) -> Archived:
    """Write the file and the manifest of a day; an archived day does not change. Closes an open day first.

    Args:
        progress: called about every 500,000 rows with the number of rows written.
        again: also write a day that is already archived; the new file replaces the old one, which is moved
            to `_outbox/kept` if it has other rows.

    Raises:
        NotReadyError: the day is not over, some of its events are not published, or its rows are dropped.
        SetupError: OUTBOX_ARCHIVE is not set, or the archive belongs to another outbox; the manifest is not
            the one that was written.
        UnavailableError: the database or the archive does not answer.
    """
    store = open_store(settings)
    with working_at(settings, day) as connection:
        _require_closed(settings, connection, day)
        if attachment_of(connection, day) != "gone":
            close.require_published(connection, day)
        place = identity.require_or_make(store, connection)
        before = store.read(manifest_key(day))
        row = require_day(connection, day)
        state, known = row.state, row.manifest_sha256
        if state == "dropped" and (again or before is None):
            raise _without_rows(store, day, is_archived=known is not None, is_there=before is not None)
        if known is not None and not again and state != "dropped":
            _require_known(store, day, before, known)
        if before is not None and not again:
            manifest = read_manifest(before.content, day)
            if state == "dropped":
                return Archived(manifest, False, store.address(key(day, manifest.file)))
            # Written by a run that crashed before it recorded the day in the database, or by another process.
            if known is None and not proof.prove(store, day, connection, leaf_of(day), None).equal:
                raise SetupError(
                    f"{store.url} (OUTBOX_ARCHIVE) has other events of {day}, of {manifest.source}: "
                    f"choose another location, or replace them with `outbox archive day {day} --again`"
                )
            _record(connection, manifest, before.content, place)
            _tidy(store, manifest, before)
            return Archived(manifest, False, store.address(key(day, manifest.file)))
        if before is not None and known is not None and _is_restored(store, connection, day, known):
            manifest = read_manifest(before.content, day)
            _LOG.warning("%s was restored from this file, which has more data than the rows: file kept", day)
            _tidy(store, manifest, before)
            return Archived(manifest, False, store.address(key(day, manifest.file)))
        manifest = _write(settings, connection, store, day, progress)
        content = manifest.to_bytes()
        store.write(manifest_key(day), content, before)
        _record(connection, manifest, content, place)
        _tidy(store, manifest, before)
        return Archived(manifest, True, store.address(key(day, manifest.file)))


def _without_rows(store: Store, day: date, *, is_archived: bool, is_there: bool) -> NotReadyError:
    """Return why a dropped day cannot be archived, and what helps."""
    if not is_archived:
        return NotReadyError(f"{day} was dropped without an archive: its rows no longer exist")
    remedy = f"check it with `outbox archive verify {day}`"
    if not is_there:
        remedy = f"restore its manifest in {store.url} (OUTBOX_ARCHIVE)"
    return NotReadyError(f"{day} is dropped: its file cannot be written again without rows; {remedy}")


def verify(settings: DaySettings, day: date) -> Proof:
    """Prove that an archived day's file equals its rows; for a dropped day, that the file has not changed.

    Raises:
        NotReadyError: the day is not archived.
        SetupError, UnavailableError: as `archive`.
    """
    store = open_store(settings)
    with working_at(settings, day) as connection:
        row = require_day(connection, day)
        manifest_sha256 = row.manifest_sha256
        if manifest_sha256 is None:
            raise NotReadyError(f"{day} is {row.state}, not archived: run `outbox archive day {day}`")
        identity.require(store, connection)
        if row.state == "dropped":
            result = proof.verify(store, day, manifest_sha256)
            if (day,) in connection.execute(archive_sql.UNFINISHED).fetchall():
                line = "a change of its file was interrupted: run `outbox archive expire`, which completes it"
                return replace(result, differences=(*result.differences, line))
            return _with_leftovers(store, result)
        result = proof.prove(store, day, connection, leaf_of(day), manifest_sha256)
        connection.execute(archive_sql.PROVEN, {"day": day, "equal": result.equal, "digest": manifest_sha256})
        return _with_leftovers(store, result)


def _with_leftovers(store: Store, result: Proof) -> Proof:
    """Add the files that other readers of the directory find; none if the valid one is in doubt."""
    loaded = proof.load(store, result.day) if result.equal else None
    lines = (
        f"{store.address(name)} is not the file of this day, and readers of the directory see its rows, also "
        "what was redacted or expired since: delete it"
        for name in (store.others(result.day, loaded[0].file, foreign=True) if loaded else ())
    )
    return replace(result, differences=(*result.differences, *lines))


def _require_closed(settings: DaySettings, connection: Connection, day: date) -> None:
    if require_day(connection, day).state == "open":
        (closing,) = close.close(settings, day)
        if not closing.closed:
            raise NotReadyError(f"{day} is not closed: {closing.why_not}")


def _require_known(store: Store, day: date, before: Stored | None, known: str) -> None:
    """Raise `SetupError` if the manifest is not the one that was written: its file may have more rows."""
    if before is not None and is_recorded(before.content, known):
        return
    what = "is missing in" if before is None else "has changed in"
    raise SetupError(
        f"the manifest of {day} {what} {store.url} (OUTBOX_ARCHIVE) since it was written: find out why and "
        f"restore it. To write the day again from its rows, run `outbox archive day {day} --again`; a file "
        "with other rows is kept in _outbox/kept"
    )


def _is_restored(store: Store, connection: Connection, day: date, known: str) -> bool:
    """Return whether the rows were restored from the file: only the file has their publishing times."""
    ((restored,),) = connection.execute(archive_sql.of_leaf(archive_sql.IS_RESTORED, leaf_of(day)))
    return restored and proof.prove(store, day, connection, leaf_of(day), known).equal


def _tidy(store: Store, manifest: Manifest, before: Stored | None) -> None:
    """Remove the day's superseded files; move unreadable ones and those with other rows to `_outbox/kept`."""
    day = manifest.day
    for name in store.others(day, manifest.file):
        with store.local(name) as file:
            is_equal = _sums_or_none(file, manifest) == manifest.buckets
        if is_equal:
            store.remove(name)
            continue
        kept = store.set_aside(day, name)
        if before is not None and name.rsplit("/", 1)[-1].encode() in before.content:
            store.write(f"{kept}.json", before.content, store.read(f"{kept}.json"))
        address = store.address(kept)
        _LOG.warning("%s: %s has different rows, or cannot be read: kept as %s", day, name, address)
    store.clear(day)


def _sums_or_none(file: Path, manifest: Manifest) -> dict[int, Sum] | None:
    """Return the sums of a file; None if it cannot be read, or its columns differ from the manifest's."""
    try:
        if pq.read_schema(file).names != schema_with(manifest.columns).names:
            return None
        return proof.sums_of_file(file, manifest.columns)
    except (OSError, pa.ArrowException, proof.UnreadableError):
        return None


def _record(connection: Connection, manifest: Manifest, content: bytes, archive: UUID) -> None:
    parameters = {"day": manifest.day, "events": manifest.rows, "digest": digest(content), "archive": archive}
    if not connection.execute(archive_sql.ARCHIVED, parameters).fetchall():
        raise NotReadyError(f"{manifest.day} was reopened while it was archived: close it, and run again")


def _write(
    settings: OutboxSettings,
    connection: Connection,
    store: Store,
    day: date,
    progress: Callable[[int], None],
) -> Manifest:
    """Write the file under a name derived from its content; return its manifest."""
    from outbox_pipelines.days.archive.export import described, export

    with store.workplace(day) as directory:
        file = directory / "events.parquet"
        columns = proof.added_columns(connection, leaf_of(day))
        exported = export(settings, connection, day, leaf_of(day), columns, file, progress)
        manifest = Manifest(
            day=day,
            schema_version=VERSION,
            columns=columns,
            source=identity.source_of(connection),
            **described(file, exported, columns),
        )
        store.adopt(file, key(day, manifest.file))
    return manifest
