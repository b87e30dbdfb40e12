"""The history of one aggregate, from the table and the archive.

Invariants:
- Each event appears once, in the order of `seq`. Attached days are read from the table, other days from the
  archive; a day that is dropped in between is read from one of the two.
- A dropped day that is missing in the archive is an error, because the history would be incomplete. So is a
  day whose partition is detached and that is not archived.
- A dead letter of the archive has the status of now. What cannot be known is not claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from typing import Any, Final, Literal

import psycopg

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.archive import archive_sql
from outbox_pipelines.days.archive.store import Store
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import NO_ARCHIVE, DaySettings


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of the aggregate."""

    seq: int
    id: str
    created_at: datetime
    """UTC."""
    event_type: str
    payload: str
    """JSON."""
    headers: str | None
    """JSON, an object of texts."""
    idempotency_key: str | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    version: int | None
    status: str
    """PENDING, PROCESSED, FAILED or DISCARDED. Of a dead letter in the archive also RESOLVED or UNKNOWN:
    see `NOTES`."""
    published_at: datetime | None
    """UTC, to the second; None if not known."""
    attempts: int
    last_error: str | None
    place: Literal["table", "archive"]
    """Where the event was read."""


COLUMNS: Final = [field.name for field in fields(Happened)]
_STORED: Final = COLUMNS[:-1]
NOTES: Final = {
    "RESOLVED": "a dead letter that was published or discarded, so long ago that only outbox_audit knows",
    "UNKNOWN": "a dead letter when its day was archived; your role may not read what became of it (grant it "
    "the kind analyst), or the day is of another database",
}
"""What two statuses mean, for people."""


def history(
    settings: DaySettings, aggregate_type: str, aggregate_id: str, *, verify: bool = False
) -> list[Happened]:
    """Return the events of one aggregate, by `seq`; an empty list if it has none.

    Args:
        verify: compare each manifest with its digest in the database, and each file with its digest in the
            manifest, which reads all of it; otherwise the size of the file, in a directory.

    Raises:
        SetupError: the archive does not have all dropped days, a file cannot be read or has changed, or
            OUTBOX_ARCHIVE is not set.
        UnavailableError: the database or the archive does not answer.
    """
    aggregate = {"aggregate_type": aggregate_type, "aggregate_id": aggregate_id}
    # The days are read before and after: one that changes in between is also read from the archive.
    with connect_to_outbox(settings, name="outbox archive history") as connection, connection.transaction():
        before = _attached(connection)
        of_table = connection.execute(archive_sql.HISTORY, aggregate).fetchall()
        attached = before & _attached(connection)
        days = connection.execute(archive_sql.WHERE_DAYS_ARE).fetchall()
    only_archived = [day for day, _, digest, _ in days if digest and day not in attached]
    for day, _, digest, exists in days:
        if exists and not digest and day not in attached:
            raise SetupError(
                f"the partition of {day} is detached, and the day is not archived: run "
                f"`outbox partitions attach {day}`"
            )
    digests = {day: digest for day, _, digest, _ in days} if verify else None
    of_archive = _archived(settings, attached, only_archived, aggregate, digests)
    archived = [Happened(*(*row, "archive")) for row in of_archive]
    by_seq = {one.seq: one for one in _as_of_now(settings, archived, {day for day, *_ in days})}
    by_seq |= {row[0]: Happened(*(*row, "table")) for row in of_table}
    return [by_seq[seq] for seq in sorted(by_seq)]


def _as_of_now(settings: DaySettings, archived: list[Happened], known: set[date]) -> list[Happened]:
    """Return events of the archive; dead letters among them with what became of them since.

    Args:
        known: the days of this database.
    """
    if not (failed := [one.seq for one in archived if one.status == "FAILED"]):
        return archived
    with connect(settings, name="outbox archive history") as connection:
        try:
            rows = connection.execute(archive_sql.SINCE_ARCHIVED, {"seqs": failed}).fetchall()
        except psycopg.errors.InsufficientPrivilege:
            rows, known = [], set()
    names = ("status", "published_at", "attempts", "last_error")
    since = {(seq, id): dict(zip(names, values, strict=True)) for seq, id, *values in rows}

    def now(one: Happened) -> Happened:
        # A dead letter leaves outbox_parked only when it is published, or long after it was discarded.
        missing = {"status": "RESOLVED" if one.created_at.date() in known else "UNKNOWN"}
        return replace(one, **since.get((one.seq, one.id), missing)) if one.status == "FAILED" else one

    return list(map(now, archived))


def _attached(connection: Connection) -> set[date]:
    return {day for day, is_attached, *_ in connection.execute(archive_sql.WHERE_DAYS_ARE) if is_attached}


def _archived(
    settings: DaySettings,
    attached: set[date],
    required: Sequence[date],
    aggregate: dict[str, str],
    digests: Mapping[date, str | None] | None,
) -> list[tuple[Any, ...]]:
    """Return the rows of days that are not in the table.

    Args:
        digests: of the manifests in the database; None: the sizes of files are compared alone.
    """
    from outbox_pipelines.days.archive import proof
    from outbox_pipelines.days.archive.data_set import Archive, differing
    from outbox_pipelines.days.archive.question import refusing

    if settings.archive in ("", NO_ARCHIVE):
        if required:
            raise SetupError(
                f"{_some(required)} not in the table, only in the archive: set OUTBOX_ARCHIVE to its location"
            )
        return []
    store = Store(settings.archive)
    archive = Archive(store)
    archive.require_readable(required)
    if missing := [day for day in required if day not in archive.manifests]:
        raise SetupError(f"{_some(missing)} not in the table, and not in {settings.archive} (OUTBOX_ARCHIVE)")
    if not (days := [day for day in archive.manifests if day not in attached]):
        return []
    if digests is None:
        for difference in differing(archive, days):
            raise SetupError(difference)
    else:
        for day in days:
            proof.require_unchanged(store, day, digests.get(day))
    with refusing():
        rows = archive.of_days(
            days,
            columns=_STORED,
            aggregate_type=aggregate["aggregate_type"],
            aggregate_id=aggregate["aggregate_id"],
        )
        return [tuple(_utc(value) for value in row) for row in rows.fetchall()]


def _utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _some(days: Sequence[date]) -> str:
    first = str(days[0])
    return f"{first} is" if len(days) == 1 else f"{first} and {len(days) - 1} more days are"
