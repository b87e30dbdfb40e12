"""Find which ids without an event of the day belong to an event of another day, and so are not phantoms.

Invariants:
- The table is queried again, with all its days, so that events written since are known too.
- Days that are not in the table are read from the archive if the ids can belong to them. The manifests show
  their ranges of ids, because a backfilled event has an id of another day.
"""

from __future__ import annotations

from datetime import date
from typing import Final

import pyarrow as pa

from outbox_pipelines.database import connect
from outbox_pipelines.reconciliation import events, queries
from outbox_pipelines.reconciliation.workspace import Workspace
from outbox_pipelines.settings import Settings

# Few enough for the server to use the index.
_AT_ONCE: Final = 1_000


def forget(settings: Settings, day: date, side: str, space: Workspace) -> list[str]:
    """Remove the known ids from `unknown`; return notes about days that could not be read."""
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
                notes.append(f"events of {other} are unavailable: those with an id of {day} count as phantom")
            continue
        # A backfilled event has an id of the day on which it was written, not of its own day.
        least, greatest = readable[other]
        is_near = is_beside and any_untimed
        if is_near or (first and least and greatest and least <= last and greatest >= first):
            for batch in events.archived_ids(settings, other):
                space.add(queries.ADD_FOUND, batch)
    space.run(queries.FORGET_FOUND.format(side=side))
    gone = [other for other, _, is_beside in others if other not in readable and not is_beside]
    if gone and space.rows(f"{unknown} LIMIT 1"):
        notes.append(
            f"{len(gone)} other days are not in a readable archive ({gone[0]} to {gone[-1]}): "
            "an event that was backfilled into one of them counts as phantom"
        )
    return notes
