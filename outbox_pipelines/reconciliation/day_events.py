"""Read the events of the day from the table or, if the day is dropped, from the archive.

Ids that belong to an event of another day are found too, since they are not phantoms. Ids of version 7
contain the time when they were generated.

Invariants:
- An event and its state are read in the same snapshot; for an archived event, its current state is read.
- The table is queried again, with all its days, so that events written since are known too.
- A file in the archive is compared with its manifest, and that with its digest in the database, before it is
  read: a file that has lost events would hide that messages have no event.
- Days that are not in the table are read from the archive if the ids can belong to them. The manifests show
  their ranges of ids, because a backfilled event has an id of another day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import pyarrow as pa
from psycopg import sql

from outbox_pipelines.core.text import counted
from outbox_pipelines.database import connect
from outbox_pipelines.days.archive.store import Store, named
from outbox_pipelines.days.partitions.calendar import bounds_of, leaf_of, require_day
from outbox_pipelines.errors import SetupError
from outbox_pipelines.reconciliation import reconciliation_sql
from outbox_pipelines.reconciliation.exchange import Exchange
from outbox_pipelines.reconciliation.workspace import Workspace, reading
from outbox_pipelines.settings import DaySettings

_COLUMNS: Final = ("id", "seq", "aggregate_type", "aggregate_id", "event_type", "created_at", "status")
_STATES: Final = {"PROCESSED": "published", "FAILED": "failed", "DISCARDED": "discarded"}
_ROWS: Final = 100_000
_TOLD: Final = 1_000_000
# Few enough for the server to use the index.
_AT_ONCE: Final = 1_000


@dataclass(slots=True)
class Events:
    """What is known of all events of the day."""

    is_archived: bool
    """Whether they were read in the archive, not in the table."""
    is_over: bool
    count: int = 0
    first: str | None = None
    last: str | None = None
    """The lowest and the highest id of version 7."""


def read(
    settings: DaySettings,
    day: date,
    step: str,
    slices: int,
    exchange: Exchange,
    space: Workspace,
    progress: Callable[[str], None],
) -> Events:
    """Pass on `written`, `parked` and `replayed`, and fill `kinds`.

    Raises:
        SetupError: the outbox has no such day, or it has not begun; its events are neither in the table nor
            in the archive, or its file has changed.
        UnavailableError: the database or the archive does not answer.
    """
    with connect(settings, name=f"outbox reconcile: {day}") as connection:
        known = require_day(connection, day)
        ((is_attached, is_readable, today),) = connection.execute(
            reconciliation_sql.WHERE_IT_IS, {"leaf": leaf_of(day)}
        )
    if day > today:
        raise SetupError(f"{day} has not begun: choose a past day, or today")
    start, stop = map(sql.Literal, bounds_of(day))
    query = reconciliation_sql.OPEN_EVENTS if known.state == "open" else reconciliation_sql.CLOSED_EVENTS
    found = Events(is_archived=not (is_attached or is_readable), is_over=day < today)
    with reading(settings.require_dsn(), settings.db_schema) as rows:
        # An interrupted drop detached the partition; the rows still exist.
        table = sql.Identifier("outbox" if is_attached else leaf_of(day))
        of_table = sql.SQL(query).format(start=start, stop=stop, table=table)
        with exchange.writing(space, step, "written", reconciliation_sql.SCATTER_EVENTS, slices) as out:
            of_archive = _of_archive(settings, day, known.manifest_sha256)
            for batch in of_archive if found.is_archived else rows(of_table):
                space.add(reconciliation_sql.ADD_KINDS, batch)
                out.add(batch)
                _count(found, space, batch, progress)
        with exchange.writing(space, step, "parked", reconciliation_sql.SCATTER, slices) as out:
            if found.is_archived:
                for batch in rows(sql.SQL(reconciliation_sql.PARKED).format(start=start, stop=stop)):
                    out.add(batch)
        with exchange.writing(space, step, "replayed", reconciliation_sql.KEEP_ALL, 1) as out:
            for batch in rows(sql.SQL(reconciliation_sql.REPLAYED).format(start=start)):
                out.add(batch)
    return found


def _count(found: Events, space: Workspace, batch: pa.RecordBatch, progress: Callable[[str], None]) -> None:
    (span,) = space.table(reconciliation_sql.SPAN, pa.Table.from_batches([batch])).to_pylist()
    if span["first"] is not None:
        found.first = min(found.first or span["first"], span["first"])
        found.last = max(found.last or span["last"], span["last"])
    before, found.count = found.count, found.count + batch.num_rows
    if before // _TOLD < found.count // _TOLD:
        progress(f"{counted(found.count, 'event')} read")


def archived_spans(settings: DaySettings, days: set[date]) -> dict[date, tuple[str | None, str | None]]:
    """Return the lowest and highest id of version 7 of each of these days in the archive."""
    from outbox_pipelines.days.archive.data_set import Archive

    manifests = Archive(Store(named(settings))).manifests
    return {day: (each.first_id, each.last_id) for day, each in manifests.items() if day in days}


def archived_ids(settings: DaySettings, day: date) -> Iterator[pa.RecordBatch]:
    """Return the ids of an archived day; none if the archive does not have it."""
    from outbox_pipelines.days.archive.data_set import Archive, differing
    from outbox_pipelines.days.archive.question import refusing

    archive = Archive(Store(named(settings)))
    if day in archive.manifests:
        for difference in differing(archive, [day]):
            raise SetupError(difference)
        with refusing():
            yield from archive.of_days([day], columns=["id"]).to_arrow_reader(_ROWS)


def _of_archive(settings: DaySettings, day: date, manifest_sha256: str | None) -> Iterator[pa.RecordBatch]:
    from outbox_pipelines.days.archive import proof
    from outbox_pipelines.days.archive.data_set import Archive
    from outbox_pipelines.days.archive.question import refusing

    if not settings.archives:
        raise SetupError(
            f"{day} is not in the table, and no archive is configured: set OUTBOX_ARCHIVE to its location"
        )
    store = Store(settings.archive)
    archive = Archive(store)
    archive.require_readable([day])
    if day not in archive.manifests:
        raise SetupError(f"{day} is neither in the table nor in {settings.archive} (OUTBOX_ARCHIVE)")
    if removed := [change for change in archive.manifests[day].changes if change.kind == "expired"]:
        events = counted(sum(change.events for change in removed), "event")
        raise SetupError(
            f"{events} of {day} were removed by retention on {removed[-1].at:%Y-%m-%d}: the day cannot be "
            "reconciled"
        )
    proof.require_unchanged(store, day, manifest_sha256)
    with refusing():
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
    left, any_untimed = space.row(reconciliation_sql.UNKNOWN_LEFT.format(side=side))
    if not left:
        return notes
    archived = {other for other, is_archived, _ in others if is_archived}
    # Those of the day, not of the ids: each slice must look for an id in the same days.
    first, end = map(floor, bounds(day))
    readable = archived_spans(settings, archived) if settings.archives and archived else {}
    for other, _, is_beside in others:
        if other not in readable:
            if is_beside:
                notes.append(f"events of {other} are unavailable: those with an id of {day} count as phantom")
            continue
        # A backfilled event has an id of the day on which it was written, not of its own day.
        least, greatest = readable[other]
        is_near = is_beside and any_untimed
        if is_near or (least and greatest and least < end and greatest >= first):
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


DAY_MS: Final = 86_400_000
_RING: Final = 64


def floor(ms: int) -> str:
    """Return the lowest id of this millisecond (since 1970)."""
    digits = f"{ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-0000-0000-000000000000"


def milliseconds(id: str) -> int:
    """Return the milliseconds since 1970 of an id of version 7."""
    return int(id[:8] + id[9:13], 16)


def bounds(day: date) -> tuple[int, int]:
    """Return the start and end of a UTC day, in milliseconds since 1970."""
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    return start, start + DAY_MS


def buckets(first_ms: int, end_ms: int) -> list[int]:
    """Return the buckets of `processed_events` (a ring of days) for ids of these times."""
    days = range(first_ms // DAY_MS, (end_ms - 1) // DAY_MS + 1)
    return sorted({day % _RING for day in days[:_RING]})


def at(ms: int) -> datetime:
    """Return the time in UTC."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
