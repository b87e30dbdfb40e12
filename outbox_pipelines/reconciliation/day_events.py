"""Read the events of the day from the table or, if the day is dropped, from the archive.

Ids that belong to an event of another day are found too, since they are not phantoms.

Invariants:
- An event and its state are read in the same snapshot; for an archived event, its current state is read.
- The table is queried again, with all its days, so that events written since are known too.
- Days that are not in the table are read from the archive if the ids can belong to them. The manifests show
  their ranges of ids, because a backfilled event has an id of another day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from typing import Final

import pyarrow as pa
from psycopg import sql

from outbox_pipelines.core.text import counted
from outbox_pipelines.database import connect
from outbox_pipelines.days.archive.store import Store, named
from outbox_pipelines.days.partitions.calendar import bounds_of, leaf_of, require_day
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import reconciliation_sql
from outbox_pipelines.reconciliation.workspace import Workspace, reading
from outbox_pipelines.settings import DaySettings

_COLUMNS: Final = ("id", "seq", "aggregate_type", "aggregate_id", "event_type", "created_at", "status")
_STATES: Final = {"PROCESSED": "published", "FAILED": "failed", "DISCARDED": "discarded"}
_ROWS: Final = 100_000
_TOLD: Final = 1_000_000
# Few enough for the server to use the index.
_AT_ONCE: Final = 1_000


def load(
    settings: DaySettings, day: date, space: Workspace, progress: Callable[[str], None]
) -> tuple[str, bool]:
    """Fill `events`; return where they were read (table or archive), and whether the day is over.

    Raises:
        SetupError: the outbox has no such day, or it has not begun; its events are neither in the table nor
            in the archive.
        UnavailableError: the database or the archive does not answer.
    """
    with connect(settings, name=f"outbox reconcile: {day}") as connection:
        state, *_ = require_day(connection, day)
        ((is_attached, is_readable, today),) = connection.execute(
            reconciliation_sql.WHERE_IT_IS, {"leaf": leaf_of(day)}
        )
    if day > today:
        raise SetupError(f"{day} has not begun: choose a past day, or today")
    start, stop = map(sql.Literal, bounds_of(day))
    query = reconciliation_sql.OPEN_EVENTS if state == "open" else reconciliation_sql.CLOSED_EVENTS
    with reading(settings.require_dsn(), settings.db_schema) as read:
        # An interrupted drop detached the partition; the rows still exist.
        table = sql.Identifier("outbox" if is_attached else leaf_of(day))
        in_table = is_attached or is_readable
        of_table = sql.SQL(query).format(start=start, stop=stop, table=table)
        _fill(space, read(of_table) if in_table else _of_archive(settings, day), progress)
        if not in_table:
            space.run(reconciliation_sql.MAKE_PARKED)
            for batch in read(sql.SQL(reconciliation_sql.PARKED).format(start=start, stop=stop)):
                space.add(reconciliation_sql.ADD_PARKED, batch)
            space.run(reconciliation_sql.REVISE)
        for batch in read(sql.SQL(reconciliation_sql.REPLAYED).format(start=start)):
            space.add(reconciliation_sql.ADD_REPLAYED, batch)
    return "table" if in_table else "archive", day < today


def archived_spans(settings: DaySettings, days: set[date]) -> dict[date, tuple[str | None, str | None]]:
    """Return the lowest and highest id of version 7 of each of these days in the archive."""
    from outbox_pipelines.days.archive.data_set import Archive

    manifests = Archive(Store(named(settings))).manifests
    return {day: (each.first_id, each.last_id) for day, each in manifests.items() if day in days}


def archived_ids(settings: DaySettings, day: date) -> Iterator[pa.RecordBatch]:
    """Return the ids of an archived day; none if the archive does not have it."""
    from outbox_pipelines.days.archive.data_set import Archive

    archive = Archive(Store(named(settings)))
    if day in archive.manifests:
        yield from archive.of_days([day], columns=["id"]).to_arrow_reader(_ROWS)


def _fill(space: Workspace, rows: Iterator[pa.RecordBatch], progress: Callable[[str], None]) -> None:
    events = 0
    for batch in rows:
        space.add(reconciliation_sql.ADD_KINDS, batch)
        space.add(reconciliation_sql.ADD_EVENTS, batch)
        before, events = events, events + batch.num_rows
        if before // _TOLD < events // _TOLD:
            progress(f"{counted(events, 'event')} read")


def _of_archive(settings: DaySettings, day: date) -> Iterator[pa.RecordBatch]:
    from outbox_pipelines.days.archive.data_set import Archive

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


def forget(settings: DaySettings, day: date, side: str, space: Workspace) -> list[str]:
    """Remove the known ids from `unknown`; return notes about days that could not be read."""
    notes: list[str] = []
    unknown = reconciliation_sql.UNKNOWN.format(side=side)
    if not space.rows(f"{unknown} LIMIT 1"):
        return notes
    space.run(reconciliation_sql.MAKE_FOUND)
    with connect(settings, name=f"outbox reconcile: {day}") as connection:
        for chunk in space.chunks(unknown, _AT_ONCE):
            found = connection.execute(reconciliation_sql.KNOWN, {"ids": [id for (id,) in chunk]}).fetchall()
            space.add(
                reconciliation_sql.ADD_FOUND, pa.table({"id": pa.array([id for (id,) in found], pa.string())})
            )
        others = connection.execute(reconciliation_sql.OTHERS, {"day": day}).fetchall()
    space.run(reconciliation_sql.FORGET_FOUND.format(side=side))
    first, last, any_untimed, left = space.row(reconciliation_sql.UNKNOWN_SPAN.format(side=side))
    if not left:
        return notes
    archived = {other for other, is_archived, _ in others if is_archived}
    readable = archived_spans(settings, archived) if settings.archives and archived else {}
    for other, _, is_beside in others:
        if other not in readable:
            if is_beside:
                notes.append(f"events of {other} are unavailable: those with an id of {day} count as phantom")
            continue
        # A backfilled event has an id of the day on which it was written, not of its own day.
        least, greatest = readable[other]
        is_near = is_beside and any_untimed
        if is_near or (first and least and greatest and least <= last and greatest >= first):
            for batch in archived_ids(settings, other):
                space.add(reconciliation_sql.ADD_FOUND, batch)
    space.run(reconciliation_sql.FORGET_FOUND.format(side=side))
    gone = [other for other, _, is_beside in others if other not in readable and not is_beside]
    if gone and space.rows(f"{unknown} LIMIT 1"):
        notes.append(
            f"not in a readable archive: {counted(len(gone), 'other day')} ({gone[0]} to {gone[-1]}), "
            "and an event that was backfilled there counts as phantom"
        )
    return notes
