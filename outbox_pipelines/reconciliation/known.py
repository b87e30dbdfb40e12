"""Ids that are of no event of the day: which of them are of another day's, and so no phantoms.

Invariants:
- The table is asked once more, all days of it: what was written in the meantime is known too.
"""

from __future__ import annotations

from datetime import date
from typing import Final

import pyarrow as pa

from outbox_pipelines.database import connect
from outbox_pipelines.reconciliation import events, queries
from outbox_pipelines.reconciliation.workspace import Workspace
from outbox_pipelines.settings import Settings

# Few enough for the server to go by the index.
_AT_ONCE: Final = 1_000


def forget(settings: Settings, day: date, side: str, space: Workspace) -> list[str]:
    """Takes the known ones out of `unknown`; what to say of days that could not be asked."""
    notes: list[str] = []
    unknown = queries.UNKNOWN.format(side=side)
    if not space.rows(f"{unknown} LIMIT 1"):
        return notes
    space.run(queries.MAKE_FOUND)
    with connect(settings, name=f"outbox reconcile: {day}") as connection:
        for chunk in space.chunks(unknown, _AT_ONCE):
            found = connection.execute(queries.KNOWN, {"ids": [id for (id,) in chunk]}).fetchall()
            space.add(queries.ADD_FOUND, pa.table({"id": pa.array([id for (id,) in found], pa.string())}))
        neighbours = connection.execute(queries.NEIGHBOURS, {"day": day}).fetchall()
    for neighbour, is_archived in neighbours:
        if is_archived and settings.archives:
            for batch in events.archived_ids(settings, neighbour):
                space.add(queries.ADD_FOUND, batch)
        else:
            notes.append(f"events of {neighbour} are gone: one whose id was drawn on {day} counts as phantom")
    space.run(queries.FORGET_FOUND.format(side=side))
    return notes
