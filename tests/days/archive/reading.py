"""Archives that are written by hand, without a database: any schema, any size of row groups."""

from __future__ import annotations

import hashlib
import io
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from outbox_pipelines.days.archive.manifest import SCHEMA, VERSION, Manifest, Source
from outbox_pipelines.days.archive.store import key, manifest_key

ONE, TWO, THREE = (date(2013, 1, day) for day in (1, 2, 3))
AMPLE = 100_000


def event(day: date, seq: int, **columns: Any) -> dict[str, Any]:
    """A row of a file."""
    return {
        "id": f"00000000-0000-7000-8000-{seq:012}",
        "seq": seq,
        "aggregate_type": "order",
        "aggregate_id": str(seq % 10),
        "event_type": "order.placed",
        "payload": f'{{"n": {seq}}}',
        "created_at": datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(seconds=seq),
        "status": "PROCESSED",
        "attempts": 0,
        **columns,
    }


def objects(
    day: date,
    rows: Sequence[dict[str, Any]],
    schema: pa.Schema = SCHEMA,
    version: int = VERSION,
    group: int = AMPLE,
) -> dict[str, bytes]:
    """The file of a day and its manifest, by key."""
    ordered = sorted(rows, key=lambda row: (row["aggregate_type"], row["aggregate_id"], row["seq"]))
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ordered, schema), stream, row_group_size=group, compression="zstd")
    content = stream.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    manifest = Manifest(
        day=day,
        file=f"events-{sha256[:16]}.parquet",
        size=len(content),
        sha256=sha256,
        rows=len(rows),
        first_seq=min((row["seq"] for row in rows), default=None),
        last_seq=max((row["seq"] for row in rows), default=None),
        first_created_at=min((row["created_at"] for row in rows), default=None),
        last_created_at=max((row["created_at"] for row in rows), default=None),
        first_id=min((row["id"] for row in rows), default=None),
        last_id=max((row["id"] for row in rows), default=None),
        statuses={},
        buckets={},
        schema_version=version,
        tool="a test",
        source=Source(system_identifier=1, database="d", schema="s"),
        written_at=datetime(2013, 2, 1, tzinfo=UTC),
    )
    return {key(day, manifest.file): content, manifest_key(day): manifest.to_bytes()}


def put_day(root: Path, day: date, rows: Sequence[dict[str, Any]], **given: Any) -> Path:
    """Writes a day into a directory; the path of its file."""
    made = objects(day, rows, **given)
    for name, content in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root / next(iter(made))


def three_days(root: Path) -> dict[date, Path]:
    """Ten events a day, of ten aggregates, seq from 10, 20 and 30; the files."""
    return {
        day: put_day(root, day, [event(day, seq) for seq in range(10 * n, 10 * n + 10)])
        for n, day in enumerate((ONE, TWO, THREE), start=1)
    }


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, made: dict[str, bytes]) -> Iterator[str]:
    """The URL of an archive with these objects in a bucket of its own."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        # All servers of a process share what they hold.
        name_of_bucket = f"analysts-{uuid.uuid4().hex[:12]}"
        client.create_bucket(Bucket=name_of_bucket)
        for name, content in made.items():
            client.put_object(Bucket=name_of_bucket, Key=f"some/archive/{name}", Body=content)
        yield f"s3://{name_of_bucket}/some/archive"
    finally:
        server.stop()
