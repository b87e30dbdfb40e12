"""Which days the outbox has, and how many lie ahead.

Invariants:
- Days are UTC days, by the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from typing import Final

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.partitions import queries
from outbox_pipelines.schema import require_schema
from outbox_pipelines.settings import Settings

FEW_AHEAD: Final = 7
"""With fewer days ahead somebody must look: maintenance has failed for a week."""


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the outbox."""

    day: date
    state: str
    """open, closed, archived or dropped."""
    attached: bool
    """Whether its partition is there."""
    rows: int
    """About so many; exactly, once it is archived."""
    size: int
    """Bytes of its partition, with indexes."""
    archived_at: datetime | None
    """When its file was written."""
    proven_at: datetime | None
    """When file and rows were last found equal."""


def read(settings: Settings) -> list[Day]:
    """All days, in order.

    Raises:
        SetupError: the database does not answer, or has no outbox.
    """
    require_schema(settings)
    with connect(settings, name="outbox partitions") as connection:
        return [Day(*row) for row in connection.execute(queries.DAYS)]


def waiting(settings: Settings) -> list[date]:
    """The days that are closed and not archived, in order.

    Raises:
        SetupError: as `read`.
    """
    return [day.day for day in read(settings) if day.state == "closed"]


def leaf_of(day: date) -> str:
    """The name of a day's partition."""
    return f"outbox_{day:%Y%m%d}"


def ahead(connection: Connection) -> int:
    """How many days from tomorrow have a partition."""
    ((days,),) = connection.execute(queries.AHEAD)
    return int(days)
