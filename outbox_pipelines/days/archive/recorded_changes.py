"""The changes of archived days as the database has them: who changed what, when and why.

Invariants:
- The manifest of a day has the same chain. It is believed where it leads from what the database has.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import NamedTuple

from outbox_pipelines.database import Connection, connect
from outbox_pipelines.database.schema import require_schema
from outbox_pipelines.days.archive import archive_sql
from outbox_pipelines.days.archive.manifest import Change, Manifest, digest
from outbox_pipelines.settings import DaySettings


class Recorded(NamedTuple):
    """A change as the database has it."""

    day: date
    former_deleted_at: datetime | None
    """None: the former file may still exist."""
    change: Change


def recorded(settings: DaySettings) -> list[Recorded]:
    """Return all changes, in the order in which they were made.

    Raises:
        UnavailableError: the database does not answer.
    """
    require_schema(settings)
    with connect(settings, name="outbox archive changes") as connection:
        rows = connection.execute(archive_sql.CHANGES).fetchall()
    names = Change.model_fields
    return [
        Recorded(day, deleted_at, Change(**dict(zip(names, change, strict=True))))
        for day, deleted_at, *change in rows
    ]


def unfinished(settings: DaySettings) -> list[date]:
    """Return the days of which a change was interrupted.

    Raises:
        UnavailableError: the database does not answer.
    """
    require_schema(settings)
    with connect(settings, name="outbox archive expire") as connection:
        return [day for (day,) in connection.execute(archive_sql.UNFINISHED)]


def record(connection: Connection, manifest: Manifest, content: bytes) -> None:
    """Record in the database a manifest with changes, and all of its changes."""
    # Each change led to the manifest that the next one replaced.
    digests = [*(each.manifest_sha256 for each in manifest.changes[1:]), digest(content)]
    changes = [
        {**change.model_dump(), "names": list(change.names), "day": manifest.day, "led_to": led_to}
        for change, led_to in zip(manifest.changes, digests, strict=True)
    ]
    with connection.transaction():
        connection.cursor().executemany(archive_sql.CHANGE, changes)
        given = {"day": manifest.day, "events": manifest.rows, "digest": digests[-1]}
        connection.execute(archive_sql.CHANGED, given)
