"""Delete what is no longer needed: old idempotency keys, progress, and records of parked events.

Invariants:
- Rows are deleted in batches, each in its own transaction: other sessions wait only briefly, and an
  interrupted purge keeps what it has done.
- The rows that show when an event was published stay until its day is archived.
- Dead letters stay, however old: they can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.days.partitions import close, queries
from outbox_pipelines.settings import NO_ARCHIVE, Settings


@dataclass(frozen=True, slots=True)
class Purged:
    """Numbers of deleted rows."""

    keys: int
    progress: int
    released: int
    discarded: int


def purge(settings: Settings) -> Purged:
    """Delete keys older than OUTBOX_KEY_RETENTION_DAYS, and the other rows together with their days.

    Raises:
        SetupError: this role does not own the outbox.
        UnavailableError: the database does not answer, or its clock and this machine's differ.
    """
    require_schema(settings)
    with connect(settings, name="outbox partitions purge") as connection:
        close.compare_clocks(connection)
        given = {"archives": settings.archive != NO_ARCHIVE, "retention": settings.retention_days}
        ((before,),) = connection.execute(queries.PURGE_BEFORE, given)
        return Purged(
            keys=_keys(connection, settings.key_retention_days),
            progress=_all(connection, queries.PURGE_PROGRESS, {"before": before}),
            released=_all(connection, queries.PURGE_RELEASED, {"before": before}),
            discarded=_all(connection, queries.PURGE_DISCARDED, {"before": before}),
        )


def _keys(connection: Connection, days: int) -> int:
    ((pages,),) = connection.execute(queries.KEY_PAGES)
    removed = 0
    for start in range(0, pages, queries.PAGES):
        given = {"from": start, "to": start + queries.PAGES, "days": days}
        removed += connection.execute(queries.PURGE_KEYS, given).rowcount
    return removed


def _all(connection: Connection, query: str, given: dict[str, object]) -> int:
    removed = 0
    while count := connection.execute(query.encode(), given).rowcount:
        removed += count
    return removed
