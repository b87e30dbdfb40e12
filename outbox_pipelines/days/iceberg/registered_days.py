"""Register the archived days in the Iceberg table, and compare them with it.

Invariants:
- Only days are registered whose manifest is the one that the outbox has recorded, and whose file is there.
- One commit registers all days that the table lacks: a day is in it once or not at all, whatever runs at the
  same time. Registering again changes nothing.
- It writes nothing but Iceberg's metadata, and what another engine has changed stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Final
from uuid import UUID

from pyiceberg.catalog import Catalog
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.database.locks import AdvisoryLock
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.archive import archive_sql, identity
from outbox_pipelines.days.archive.manifest import Manifest, is_recorded, read_manifest
from outbox_pipelines.days.archive.store import Store, key, manifest_key, open_store
from outbox_pipelines.days.iceberg import iceberg_table
from outbox_pipelines.days.iceberg.iceberg_catalog import answering, opened, root_of
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import DaySettings

_LOCK: Final = AdvisoryLock("hashtextextended('outbox iceberg', 'outbox'::regclass::oid::bigint)")
# A bucket takes tens of milliseconds for each object.
_READERS: Final = 16
_REGISTER: Final = "run `outbox archive register`"


@dataclass(frozen=True, slots=True)
class Registration:
    """The result of `register`."""

    table: str
    added: tuple[date, ...]
    replaced: tuple[date, ...]
    """Days that were archived again since they were registered."""
    unchanged: int
    differences: tuple[str, ...]
    """One line for each day that could not be registered, or that another engine has changed."""


@dataclass(frozen=True, slots=True)
class _Place:
    store: Store
    connection: Connection
    catalog: Catalog
    root: str
    archive: UUID
    archived: Mapping[date, str]
    """The digest of each archived day's manifest, as the outbox has recorded it."""


def register(settings: DaySettings, *, again: bool = False) -> Registration:
    """Register each archived day that the table lacks; create the table if there is none.

    Args:
        again: in a new table, which replaces the present one in the catalog.

    Raises:
        NotReadyError: another process is registering days; no day is archived.
        SetupError: a setting is missing or wrong; the table is not that of the archive.
        UnavailableError: the database, the archive or the catalog does not answer.
    """
    with _opened(settings, is_alone=True) as place:
        name = iceberg_table.identifier_of(settings.name)
        with answering():
            table = iceberg_table.find(place.catalog, name, place.archive)
            if table is not None and again:
                # It deletes no file, and the table has none but the archive's.
                place.catalog.drop_table(name)
                table = None
            if table is None:
                table = iceberg_table.create(place.catalog, name, place.root, place.archive)
            iceberg_table.require_unchanged(table, place.root)
            known = iceberg_table.read(table)
        return _register(place, table, known)


def _register(place: _Place, table: Table, known: Mapping[date, iceberg_table.Day]) -> Registration:
    differences = [
        f"{day}: it is in the Iceberg table, but the outbox has not archived it"
        for day in sorted(known.keys() - place.archived.keys())
    ]
    due, unchanged = [], 0
    for day, recorded in place.archived.items():
        found = known.get(day, iceberg_table.Day())
        if (change := found.changes(place.root, day)) is not None:
            differences.append(f"{day}: {change}")
        elif found.registered is not None and found.registered.manifest_sha256 == recorded:
            unchanged += 1
        else:
            due.append(day)
    with ThreadPoolExecutor(_READERS) as threads:
        read = threads.map(lambda day: _manifest(place, day), due)
    manifests: list[Manifest] = []
    for day, result in zip(due, read, strict=True):
        if isinstance(result, Manifest):
            manifests.append(result)
        else:
            differences.append(f"{day}: {result}")
    if manifests:
        with answering():
            _commit(place, table, known, manifests)
    days = [manifest.day for manifest in manifests]
    is_new = {day: day not in known for day in days}
    return Registration(
        ".".join(table.name()),
        tuple(day for day in days if is_new[day]),
        tuple(day for day in days if not is_new[day]),
        unchanged,
        tuple(differences),
    )


def _commit(
    place: _Place, table: Table, known: Mapping[date, iceberg_table.Day], manifests: list[Manifest]
) -> None:
    """Register these days; the former file of one that was archived again is removed in the same snapshot."""
    table = iceberg_table.with_columns(place.catalog, table, (manifest.columns for manifest in manifests))
    removed: list[DataFile] = []
    added: list[DataFile] = []
    for manifest in manifests:
        before = known[manifest.day].files if manifest.day in known else []
        now = [iceberg_table.data_file(table, place.root, manifest)] if manifest.rows else []
        # The same file has another manifest if its day was written again.
        if before != now:
            removed += before
            added += now
    properties = dict(
        iceberg_table.property_of(manifest, place.archived[manifest.day]) for manifest in manifests
    )
    with table.transaction() as transaction:
        update = transaction.update_snapshot(snapshot_properties=properties)
        with update.overwrite() if removed else update.merge_append() as producer:
            for file in removed:
                producer.delete_data_file(file)
            for file in added:
                producer.append_data_file(file)


def compare(settings: DaySettings, day: date) -> tuple[str, ...]:
    """Return how the table differs from the archive's day, one line each; nothing if it does not.

    Raises:
        SetupError, UnavailableError: as `register`.
    """
    with _opened(settings) as place:
        name = iceberg_table.identifier_of(settings.name)
        with answering():
            table = iceberg_table.find(place.catalog, name, place.archive)
            if table is None:
                return (f"the Iceberg catalog has no table {'.'.join(name)}: {_REGISTER}",)
            iceberg_table.require_unchanged(table, place.root)
            found = iceberg_table.read(table).get(day, iceberg_table.Day())
        if (change := found.changes(place.root, day)) is not None:
            return (f"Iceberg table {'.'.join(name)}: {change}",)
        manifest = _manifest(place, day)
        if isinstance(manifest, str):
            return (manifest,)
        if found.registered is None:
            return (f"it is not in the Iceberg table {'.'.join(name)}: {_REGISTER}",)
        expected = [iceberg_table.data_file(table, place.root, manifest)] if manifest.rows else []
        if found.registered.manifest_sha256 != place.archived[day]:
            return (f"the Iceberg table {'.'.join(name)} has its former file: {_REGISTER}",)
        sizes = [
            [(file.record_count, file.file_size_in_bytes) for file in files]
            for files in (found.files, expected)
        ]
        if sizes[0] != sizes[1]:
            return (f"the Iceberg table {'.'.join(name)} has other counts or sizes than its manifest",)
        return ()


@contextmanager
def _opened(settings: DaySettings, *, is_alone: bool = False) -> Iterator[_Place]:
    store = open_store(settings)
    with connect_to_outbox(settings, name="outbox archive register") as connection:
        if is_alone and (who := _LOCK.take(connection, {})) is not None:
            raise NotReadyError(f"days are being registered by {who}: wait until it ends")
        identity.require(store, connection)
        known = connection.execute(archive_sql.KNOWN_ARCHIVE).fetchone()
        if known is None:
            raise NotReadyError("no day is archived: run `outbox archive day DAY`")
        archived = dict(connection.execute(archive_sql.ARCHIVED_DAYS).fetchall())
        with opened(settings, store) as catalog:
            yield _Place(store, connection, catalog, root_of(store), known[0], archived)


def _manifest(place: _Place, day: date) -> Manifest | str:
    """Return the manifest of a day that is as it was archived; otherwise what is wrong."""
    remedy = f"run `outbox archive verify {day}`"
    stored = place.store.read(manifest_key(day))
    if stored is None or not is_recorded(stored.content, place.archived[day]):
        return f"its manifest is missing, or has changed since the day was archived: {remedy}"
    try:
        manifest = read_manifest(stored.content, day)
    except SetupError as error:
        return first_line(error)
    if place.store.size(key(day, manifest.file)) != manifest.size:
        return f"{manifest.file} is missing, or has another size than its manifest says: {remedy}"
    return manifest
