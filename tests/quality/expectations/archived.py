"""Archived days that are written without a database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from outbox_pipelines.days.archive.manifest import SCHEMA, VERSION, Column, Manifest, Source, schema_with
from outbox_pipelines.days.archive.store import key, manifest_key
from outbox_pipelines.settings import Settings, load_settings

DAY = date(2026, 11, 20)


def event(number: int, day: date = DAY, **columns: object) -> dict[str, object]:
    """A row of the archive: published a tenth of a second after it was written."""
    at = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(milliseconds=number)
    return {
        **dict.fromkeys(SCHEMA.names),
        "id": str(UUID(int=number)),
        "seq": number,
        "aggregate_type": "order",
        "aggregate_id": str(number % 10),
        "event_type": "order.placed",
        "payload": '{"total": 1}',
        "created_at": at,
        "status": "PROCESSED",
        "published_at": at + timedelta(milliseconds=100),
        "attempts": 0,
        **columns,
    }


def write(
    root: Path, rows: Iterable[Mapping[str, object]], day: date = DAY, added: Sequence[str] = ()
) -> Settings:
    """Write a day into the archive in a directory; return settings with that archive.

    Args:
        added: names of integer columns that the user has added.
    """
    columns = tuple(Column(name=name, type="integer", stored=name) for name in added)
    listed = [dict(row) for row in rows]
    schema = schema_with(columns)
    # A file that the archive writes has no row without an id; one that another tool has replaced may.
    schema = schema.set(schema.get_field_index("id"), schema.field("id").with_nullable(True))
    table = pa.Table.from_pylist(listed, schema)
    path = root / key(day, "events-0123456789abcdef.parquet")
    path.parent.mkdir(parents=True)
    pq.write_table(table, path)
    manifest = Manifest(
        day=day,
        file=path.name,
        size=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        rows=len(listed),
        first_seq=None,
        last_seq=None,
        first_created_at=None,
        last_created_at=None,
        first_id=None,
        last_id=None,
        statuses={},
        buckets={},
        schema_version=VERSION,
        columns=columns,
        tool="test",
        source=Source(system_identifier=1, database="test", schema="public"),
        written_at=datetime.now(UTC),
    )
    described = root / manifest_key(day)
    described.parent.mkdir(parents=True, exist_ok=True)
    described.write_bytes(manifest.to_bytes())
    return load_settings(archive=str(root))
