"""Read the events of the day from the table or, if the day is dropped, from the archive.

Invariants:
- An event and its state are read in the same snapshot; for an archived event, its current state is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from typing import Final

import pyarrow as pa
from psycopg import sql

from outbox_pipelines.database import connect
from outbox_pipelines.days.archive.store import Store, named
from outbox_pipelines.days.partitions.calendar import bounds_of, leaf_of, require_day
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import queries
from outbox_pipelines.reconciliation.stream import reading
from outbox_pipelines.reconciliation.workspace import Workspace
from outbox_pipelines.settings import Settings

_COLUMNS: Final = ("id", "seq", "aggregate_type", "aggregate_id", "event_type", "created_at", "status")
_STATES: Final = {"PROCESSED": "published", "FAILED": "failed", "DISCARDED": "discarded"}
_ROWS: Final = 100_000
_TOLD: Final = 1_000_000


def load(
    settings: Settings, day: date, space: Workspace, progress: Callable[[str], None]
) -> tuple[str, bool]:
    """Fill `events`; return where they were read (table or archive), and whether the day is over.

    Raises:
        SetupError: the outbox has no such day, or it has not begun; its events are neither in the table nor
            in the archive.
        UnavailableError: the database or the archive does not answer.
    """
    with connect(settings, name=f"outbox reconcile: {day}") as connection:
        state, *_ = require_day(connection, day)
        ((is_attached, is_readable, today),) = connection.execute(queries.WHERE_IT_IS, {"leaf": leaf_of(day)})
    if day > today:
        raise SetupError(f"{day} has not begun: choose a past day, or today")
    start, stop = map(sql.Literal, bounds_of(day))
    query = queries.OPEN_EVENTS if state == "open" else queries.CLOSED_EVENTS
    with reading(settings.require_dsn(), settings.db_schema) as read:
        # An interrupted drop detached the partition; the rows still exist.
        table = sql.Identifier("outbox" if is_attached else leaf_of(day))
        in_table = is_attached or is_readable
        of_table = sql.SQL(query).format(start=start, stop=stop, table=table)
        _fill(space, read(of_table) if in_table else _of_archive(settings, day), progress)
        if not in_table:
            space.run(queries.MAKE_PARKED)
            for batch in read(sql.SQL(queries.PARKED).format(start=start, stop=stop)):
                space.add(queries.ADD_PARKED, batch)
            space.run(queries.REVISE)
        for batch in read(sql.SQL(queries.REPLAYED).format(start=start)):
            space.add(queries.ADD_REPLAYED, batch)
    return "table" if in_table else "archive", day < today


def archived_spans(settings: Settings, days: set[date]) -> dict[date, tuple[str | None, str | None]]:
    """Return the lowest and highest id of version 7 of each of these days in the archive."""
    from outbox_pipelines.days.archive.reader import Archive

    manifests = Archive(Store(named(settings))).manifests
    return {day: (each.first_id, each.last_id) for day, each in manifests.items() if day in days}


def archived_ids(settings: Settings, day: date) -> Iterator[pa.RecordBatch]:
    """Return the ids of an archived day; none if the archive does not have it."""
    from outbox_pipelines.days.archive.reader import Archive

    archive = Archive(Store(named(settings)))
    if day in archive.manifests:
        yield from archive.of_days([day], columns=["id"]).to_arrow_reader(_ROWS)


def _fill(space: Workspace, rows: Iterator[pa.RecordBatch], progress: Callable[[str], None]) -> None:
    events = 0
    for batch in rows:
        space.add(queries.ADD_KINDS, batch)
        space.add(queries.ADD_EVENTS, batch)
        before, events = events, events + batch.num_rows
        if before // _TOLD < events // _TOLD:
            progress(f"{events:,} events read")


def _of_archive(settings: Settings, day: date) -> Iterator[pa.RecordBatch]:
    from outbox_pipelines.days.archive.reader import Archive

    if not settings.archives:
        raise SetupError(
            f"{day} is not in the table, and no archive is configured: set OUTBOX_ARCHIVE to its location"
        )
    archive = Archive(Store(settings.archive))
    archive.require([day])
    if day not in archive.manifests:
        raise SetupError(f"{day} is neither in the table nor in {settings.archive} (OUTBOX_ARCHIVE)")
    for batch in archive.of_days([day], columns=_COLUMNS).to_arrow_reader(_ROWS):
        states = [_STATES[status] for status in batch.column("status").to_pylist()]
        yield batch.drop_columns(["status"]).append_column("state", pa.array(states))
