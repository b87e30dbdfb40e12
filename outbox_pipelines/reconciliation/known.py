"""Ids that are of no event of the day: which of them are of another day's, and so no phantoms.

Invariants:
- The table is asked once more, all days of it: what was written since is known too.
- Of the days that the table does not show, those are read in the archive whose ids may be among them: by what
  the manifests say of their ids, since a backfilled event has an id of another day.
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
        others = connection.execute(queries.OTHERS, {"day": day}).fetchall()
    space.run(queries.FORGET_FOUND.format(side=side))
    first, last, any_untimed, left = space.row(queries.UNKNOWN_SPAN.format(side=side))
    if not left:
        return notes
    archived = {other for other, is_archived, _ in others if is_archived}
    readable = events.archived_spans(settings, archived) if settings.archives and archived else {}
    for other, _, is_beside in others:
        if other not in readable:
            if is_beside:
                notes.append(f"events of {other} are gone: one whose id was drawn on {day} counts as phantom")
            continue
        # A backfilled event has an id of the day on which it was written, whatever day it is of.
        least, greatest = readable[other]
        is_near = is_beside and any_untimed
        if is_near or (first and least and greatest and least <= last and greatest >= first):
            for batch in events.archived_ids(settings, other):
                space.add(queries.ADD_FOUND, batch)
    space.run(queries.FORGET_FOUND.format(side=side))
    gone = [other for other, _, is_beside in others if other not in readable and not is_beside]
    if gone and space.rows(f"{unknown} LIMIT 1"):
        notes.append(
            f"{len(gone)} other days are in no archive that can be read ({gone[0]} to {gone[-1]}): "
            "an event that was backfilled into one of them counts as phantom"
        )
    return notes
