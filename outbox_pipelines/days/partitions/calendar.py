"""Read which days the outbox has, and how many days ahead have a partition.

Invariants:
- Days are UTC days, by the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import NamedTuple

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.partitions import partitions_sql
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import OutboxSettings


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the outbox."""

    day: date
    state: str
    """open, closed, archived or dropped."""
    partition: str
    """attached; detaching or detached (an interrupted drop; its rows are not visible); or gone."""
    rows: int
    """An estimate; exact once the day is archived."""
    size: int
    """Bytes of the partition, with indexes."""
    archived_at: datetime | None
    """When the archive file was written."""
    proven_at: datetime | None
    """When file and rows were last proven equal."""


def read(settings: OutboxSettings) -> list[Day]:
    """Return all days, in order.

    Raises:
        SetupError: the database does not answer, or has no outbox.
    """
    with connect_to_outbox(settings, name="outbox partitions") as connection:
        return [Day(*row) for row in connection.execute(partitions_sql.DAYS)]


def first(settings: OutboxSettings) -> date | None:
    """Return the first day of the outbox; None before `outbox migrate`.

    Raises:
        SetupError: the database does not answer.
    """
    with connect(settings, name="outbox partitions") as connection:
        if connection.execute("SELECT to_regclass('outbox_days')").fetchone() == (None,):
            return None
        row = connection.execute(partitions_sql.FIRST).fetchone()
        return row[0] if row else None


def waiting(settings: OutboxSettings) -> list[date]:
    """Return the days that are closed and not archived, in order.

    Raises:
        SetupError: as `read`.
    """
    return [day.day for day in read(settings) if day.state == "closed"]


def leaf_of(day: date) -> str:
    """Return the name of a day's partition."""
    return f"outbox_{day:%Y%m%d}"


def bounds_of(day: date) -> tuple[str, str]:
    """Return the start and end of a day, in PostgreSQL's notation."""
    return f"{day} 00:00:00+00", f"{day + timedelta(1)} 00:00:00+00"


class DayLockedError(NotReadyError):
    """Another session works on the day."""


def require_order(since: date | None, until: date | None) -> None:
    """Raise `SetupError` if the first day is after the last one."""
    if since and until and since > until:
        raise SetupError(f"{since} is after {until}: --since is the first day, --until the last one")


@contextmanager
def working_at(settings: OutboxSettings, day: date) -> Iterator[Connection]:
    """Open a connection and lock the day, so that no other session works on it.

    Raises:
        DayLockedError: another session has locked the day.
    """
    with connect_to_outbox(settings, name=f"outbox: {day}") as connection:
        if (who := partitions_sql.DAY_LOCK.take(connection, {"day": day})) is not None:
            raise DayLockedError(
                f"{day} is being archived, proven, dropped or swept by {who}: wait until it ends"
            )
        yield connection


class DayRow(NamedTuple):
    """What the outbox records about a day."""

    state: str
    sealed_at: datetime | None
    archived_at: datetime | None
    proven_at: datetime | None
    manifest_sha256: str | None
    events: int | None


def require_day(connection: Connection, day: date) -> DayRow:
    """Return the row of a day.

    Raises:
        SetupError: the outbox has no such day.
    """
    row = connection.execute(partitions_sql.DAY, {"day": day}).fetchone()
    if row is None:
        raise SetupError(f"{day} is not a day of the outbox: see `outbox partitions list`")
    return DayRow(*row)


def attachment_of(connection: Connection, day: date) -> str:
    """Return the state of a day's partition: attached, detaching, detached or gone."""
    row = connection.execute(partitions_sql.ATTACHMENT, {"leaf": leaf_of(day)}).fetchone()
    return "gone" if row is None else row[0]


def ahead(connection: Connection) -> int:
    """Return how many days from tomorrow on have a partition, up to the first that has none."""
    ((days,),) = connection.execute(partitions_sql.AHEAD)
    return int(days)
