"""Days of the past with events of all shapes, published by hand, and what lies in the archive of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from psycopg.types.json import Jsonb

from outbox_pipelines.days.archive.manifest import Manifest, read_manifest
from outbox_pipelines.days.archive.store import key, manifest_key
from outbox_pipelines.settings import Settings
from tests.schema.events import Written, insert
from tests.schema.servers import Connection, Database

ODD_TYPE = """it's "odd" {} %s \\ $1"""
SEPARATED = f"a{chr(31)}=b{chr(10)}\tc"
SHAPES: tuple[Mapping[str, object], ...] = (
    {},
    {
        "headers": Jsonb({"a": "b", "empty": ""}),
        "idempotency_key": "key",
        "correlation_id": "correlation",
        "causation_id": "causation",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "version": 7,
    },
    # An empty string is not NULL.
    {"correlation_id": "", "causation_id": "", "traceparent": "", "headers": Jsonb({}), "version": 0},
    {
        "aggregate_type": "Ünïcode-Ω",
        "aggregate_id": "日本語 \N{PILE OF POO}",
        "event_type": "e\N{COMBINING ACUTE ACCENT}",
    },
    {"aggregate_id": SEPARATED, "correlation_id": chr(31), "causation_id": "\\N"},
    {"aggregate_type": ODD_TYPE, "payload": Jsonb(None), "version": -(2**31)},
    {"payload": Jsonb({"large": "x" * 90_000, "more": list(range(1000))})},
    {"payload": Jsonb([chr(31), "\\", '"', "é", [], {}, True])},
    # In the order of C, not of a language: Z before a, and those beyond ASCII last.
    *({"aggregate_id": id} for id in ("Z", "a", "B", "ä", "_", "10", "9")),
    *({"aggregate_type": type} for type in ("Order", "order ", "a", "Z", "\N{PILE OF POO}", "\uffee")),
)
# As text: Python would write them otherwise.
NUMBERS = '{"large": 1e300, "money": 0.10, "long": 12345678901234567890.12345678901234567890, "minus": -0.0}'


def days_ago(days: int) -> date:
    """A UTC day that is over for long enough, from 2 on."""
    return (datetime.now(UTC) - timedelta(days)).date()


def make_days(database: Database, *days: date) -> None:
    """Partitions of past days, as an owner makes them for a backfill."""
    database.rows("SELECT outbox_ensure_partitions(14, %s)", min(days))


@contextmanager
def writing(database: Database) -> Iterator[Connection]:
    """One transaction that may write into the past."""
    with database.connect(autocommit=False) as connection:
        connection.execute("SET LOCAL outbox.backfill = on")
        yield connection
        connection.commit()


def at(day: date, microseconds: int = 0) -> datetime:
    """A time of this day."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(microseconds=microseconds)


def write(database: Database, day: date, columns: Iterable[Mapping[str, object]] = ({},)) -> list[Written]:
    """A transaction with these events, a second and a microsecond apart."""
    with writing(database) as connection:
        return [
            insert(connection, created_at=at(day, (n % 80_000) * 1_000_001), **each)
            for n, each in enumerate(columns)
        ]


def write_many(database: Database, day: date, events: int) -> None:
    """Many plain events, in one statement."""
    with writing(database) as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
            "SELECT 'order', (i %% 100)::text, 'order.placed', "
            "jsonb_build_object('n', i, 'pad', repeat('x', 100)), %s + i * interval '1 ms' "
            "FROM generate_series(1, %s) i",
            [at(day), events],
        )


def write_shapes(database: Database, day: date) -> list[Written]:
    """Events of all shapes; the last microsecond of the day included."""
    written = write(database, day, SHAPES)
    with writing(database) as connection:
        written.append(insert(connection, created_at=at(day, 86_400_000_000 - 1)))
        row = connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
            "VALUES ('number', '1', 'number', %s::jsonb, %s) RETURNING id, seq",
            [NUMBERS, at(day, 1)],
        ).fetchone()
        assert row is not None
        written.append(Written(*row))
    return written


def publish(database: Database) -> datetime:
    """Everything that is committed counts as published, as a relay says it."""
    with database.connect() as connection:
        connection.execute(
            "UPDATE outbox_shards SET done = pg_current_snapshot(), target = NULL, last_seq = NULL"
        )
        return progress(connection)


def progress(connection: Connection) -> datetime:
    """A row of progress for where the shards are."""
    rows = connection.execute(
        "INSERT INTO outbox_progress (shard, shards, done, target, last_seq, events) "
        "SELECT shard, shards, done, target, last_seq, 1 FROM outbox_shards RETURNING at"
    ).fetchall()
    latest: datetime = max(at for (at,) in rows)
    return latest


def past_day(database: Database, ago: int = 3) -> date:
    """A day with events of all shapes that is over and published."""
    day = days_ago(ago)
    make_days(database, day)
    write_shapes(database, day)
    publish(database)
    return day


# --- what lies in the archive ---------------------------------------------------------------------------


def directory(settings: Settings, day: date) -> Path:
    return Path(settings.archive) / key(day, "")


def manifest_path(settings: Settings, day: date) -> Path:
    return Path(settings.archive) / manifest_key(day)


def names(settings: Settings, day: date) -> list[str]:
    """Everything in the directory of a day; nothing where there is none."""
    return sorted(path.name for path in directory(settings, day).glob("*"))


def manifest(settings: Settings, day: date) -> Manifest:
    return read_manifest(manifest_path(settings, day).read_bytes(), day)


def file(settings: Settings, day: date) -> Path:
    return directory(settings, day) / manifest(settings, day).file


def rows(settings: Settings, day: date) -> list[dict[str, Any]]:
    """The rows of the file, in its order."""
    # Not by a directory's name: event_date=… would become a column.
    with file(settings, day).open("rb") as stream:
        return pq.read_table(stream).to_pylist()  # type: ignore[no-any-return]


def edit_manifest(settings: Settings, day: date, /, **changes: Any) -> None:
    """The manifest as an editor leaves it."""
    path = manifest_path(settings, day)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
