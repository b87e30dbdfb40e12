"""The archive's Iceberg table: its columns, and what it has of each day.

Invariants:
- A day is a partition of one data file, which is the archive's own. A snapshot's properties name the manifest
  of each day that it registers, also of one without events. So the table itself tells which days it has.
- The archive's id in the table's properties tells whose table it is.
- A day with anything else in it was changed by another engine: it is reported, and never touched.
- A column keeps its id, which its files have: integers are widened, and a column that becomes another kind of
  value is another column, with its type in its name. Names in another case are one column.
- `gc.enabled` is false: engines that honor it delete none of the archive's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Final
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError
from pyiceberg.catalog import Catalog
from pyiceberg.conversions import to_bytes
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import pyarrow_to_schema
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.update import AddSchemaUpdate, AssertCurrentSchemaId, SetCurrentSchemaUpdate
from pyiceberg.transforms import DayTransform
from pyiceberg.typedef import Identifier, Record
from pyiceberg.types import IntegerType, LongType, NestedField

from outbox_pipelines.days.archive.manifest import EVENT_DATE, SCHEMA, Column, Manifest, schema_with
from outbox_pipelines.days.archive.store import key
from outbox_pipelines.days.iceberg.iceberg_catalog import METADATA
from outbox_pipelines.errors import SetupError

_ARCHIVE: Final = "outbox.archive"
_DAY: Final = "outbox.day."
_EPOCH: Final = date(1970, 1, 1)
_BASE: Final = pyarrow_to_schema(SCHEMA)
_SEQ: Final = _BASE.find_field("seq").field_id
_CREATED_AT: Final = _BASE.find_field("created_at").field_id
_PARTITION: Final = PartitionField(_CREATED_AT, 1000, DayTransform(), EVENT_DATE)
_PROPERTIES: Final = {
    "format-version": "2",
    "gc.enabled": "false",
    # Each day adds a manifest: a reader of ten years would open thousands.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


class Registered(BaseModel):
    """What a snapshot's properties say of a day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    sha256: str
    rows: int
    manifest_sha256: str


@dataclass(slots=True)
class Day:
    """What the table has of a day."""

    registered: Registered | None = None
    files: list[DataFile] = field(default_factory=list)

    def changes(self, root: str, day: date) -> str | None:
        """Return what another engine has done to it; None if nothing."""
        own = f"{root}/{key(day, '')}"
        for file in self.files:
            if file.content != DataFileContent.DATA:
                return "another engine has deleted rows of it"
            if not file.file_path.startswith(own):
                return f"another engine has written {file.file_path}"
        if self.registered is None:
            lost = "another engine has added its file, or has expired the snapshot that registered it"
            return lost if self.files else None
        expected = [f"{own}{self.registered.file}"] if self.registered.rows else []
        if [file.file_path for file in self.files] != expected:
            return f"another engine has removed {self.registered.file}, or has added files"
        return None


def identifier_of(outbox: str) -> Identifier:
    """Return the name of the table of an outbox."""
    return (outbox, "events")


def find(catalog: Catalog, name: Identifier, archive: UUID) -> Table | None:
    """Return the archive's table; None if there is none.

    Raises:
        SetupError: the table of this name is not the archive's.
    """
    try:
        table = catalog.load_table(name)
    except NoSuchTableError:
        return None
    shown = ".".join(name)
    if (owner := table.properties.get(_ARCHIVE)) is None:
        raise SetupError(
            f"the Iceberg catalog (OUTBOX_ICEBERG) has a table {shown} that the outbox did not create: "
            "rename it, or use another catalog"
        )
    if owner != str(archive):
        raise SetupError(
            f"the Iceberg table {shown} is of another outbox's archive ({table.location()}): give each "
            "outbox its own OUTBOX_NAME or catalog; if the archive is a new one, drop the table there"
        )
    return table


def require_unchanged(table: Table, root: str) -> None:
    """Raise `SetupError` if the table does not fit the archive's days."""
    shown = ".".join(table.name())
    if table.location() != f"{root}/{METADATA}":
        raise SetupError(
            f"the Iceberg table {shown} is at {table.location()}, and the archive at {root}: it has moved, "
            "or OUTBOX_ARCHIVE is written differently. Run `outbox archive register --again`"
        )
    if table.spec().fields != (_PARTITION,) or not _has_base(table.schema()):
        raise SetupError(
            f"another engine has changed the columns or the partitions of the Iceberg table {shown}: undo "
            "it, or run `outbox archive register --again`"
        )


def _has_base(schema: Schema) -> bool:
    names = {column.field_id: (column.name, column.field_type) for column in schema.fields}
    return all(names.get(column.field_id) == (column.name, column.field_type) for column in _BASE.fields)


def create(catalog: Catalog, name: Identifier, root: str, archive: UUID) -> Table:
    """Create the table, without days."""
    catalog.create_namespace_if_not_exists(name[:-1])
    # The catalog numbers the columns in their order, as the archive's files do.
    return catalog.create_table(
        name,
        _BASE,
        location=f"{root}/{METADATA}",
        partition_spec=PartitionSpec(_PARTITION),
        properties={**_PROPERTIES, _ARCHIVE: str(archive)},
    )


def read(table: Table) -> dict[date, Day]:
    """Return what the table has of each day.

    Raises:
        SetupError: it has files that are of no day.
    """
    days: dict[date, Day] = {}
    # In the order in which they were written, also those that another engine has rolled back.
    for snapshot in sorted(table.snapshots(), key=lambda each: each.sequence_number or 0):
        given = snapshot.summary.additional_properties if snapshot.summary is not None else {}
        for name, value in given.items():
            if name.startswith(_DAY):
                day, registered = _registered(name, value)
                days.setdefault(day, Day()).registered = registered
    current = table.current_snapshot()
    for manifest in current.manifests(table.io) if current is not None else ():
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            data_file = entry.data_file
            # A file without a day would double or hide the rows of some.
            if manifest.partition_spec_id != table.spec().spec_id or data_file.partition[0] is None:
                raise SetupError(
                    f"another engine has written {data_file.file_path} into the Iceberg table, with other "
                    "partitions: undo it, or run `outbox archive register --again`"
                )
            day = _EPOCH + timedelta(data_file.partition[0])
            days.setdefault(day, Day()).files.append(data_file)
    return days


def _registered(name: str, value: str) -> tuple[date, Registered]:
    try:
        return date.fromisoformat(name.removeprefix(_DAY)), Registered.model_validate_json(value)
    except (ValueError, ValidationError):
        raise SetupError(
            f"the Iceberg table has a property {name} that the outbox did not write: run `outbox archive "
            "register --again`"
        ) from None


def property_of(manifest: Manifest, manifest_sha256: str) -> tuple[str, str]:
    """Return the snapshot's property that registers a day."""
    registered = Registered(
        file=manifest.file, sha256=manifest.sha256, rows=manifest.rows, manifest_sha256=manifest_sha256
    )
    return f"{_DAY}{manifest.day}", registered.model_dump_json()


def data_file(table: Table, root: str, manifest: Manifest) -> DataFile:
    """Return a day's file as Iceberg has it; the manifest has all that is needed."""
    first = {_SEQ: manifest.first_seq, _CREATED_AT: manifest.first_created_at}
    last = {_SEQ: manifest.last_seq, _CREATED_AT: manifest.last_created_at}
    found = DataFile.from_args(
        _table_format_version=table.format_version,
        content=DataFileContent.DATA,
        file_path=f"{root}/{key(manifest.day, manifest.file)}",
        file_format=FileFormat.PARQUET,
        partition=Record((manifest.day - _EPOCH).days),
        record_count=manifest.rows,
        file_size_in_bytes=manifest.size,
        lower_bounds=_bounds(first),
        upper_bounds=_bounds(last),
    )
    found.spec_id = table.spec().spec_id
    return found


def _bounds(values: Mapping[int, Any]) -> dict[int, bytes]:
    return {id: to_bytes(_BASE.find_type(id), value) for id, value in values.items()}  # type: ignore[arg-type]


def with_columns(catalog: Catalog, table: Table, files: Iterable[tuple[Column, ...]]) -> Table:
    """Return the table after adding the columns that users have added, and widening integers."""
    fields = {column.field_id: column for column in table.schema().fields}
    for columns in dict.fromkeys(files):
        for column in pyarrow_to_schema(schema_with(columns)).fields:
            known = fields.get(column.field_id)
            if known is None:
                fields[column.field_id] = _named(column, {other.name.casefold() for other in fields.values()})
            elif (known.field_type, column.field_type) == (IntegerType(), LongType()):
                fields[column.field_id] = known.model_copy(update={"field_type": LongType()})
    if tuple(fields.values()) == table.schema().fields:
        return table
    number = max(schema.schema_id for schema in table.metadata.schemas) + 1
    catalog.commit_table(
        table,
        (AssertCurrentSchemaId(current_schema_id=table.schema().schema_id),),
        (AddSchemaUpdate(schema_=Schema(*fields.values(), schema_id=number)), SetCurrentSchemaUpdate()),
    )
    return catalog.load_table(table.name())


def _named(field: NestedField, taken: set[str]) -> NestedField:
    name = field.name
    while name.casefold() in taken:
        name = f"{name}_{field.field_type}"
    return NestedField(field.field_id, name, field.field_type, required=False)
