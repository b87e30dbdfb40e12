"""The demo's last part: days that are over are closed, archived and proven, the oldest are dropped.

Invariants:
- The airline's first days are written once more, as if they had been a few days ago: by the table's owner,
  who declares a backfill. Applications cannot do that.
- Nothing here is special to the demo but the backfill: the rest is what maintenance does each day.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

from examples.airline import queries
from examples.airline.flights import DEPARTED
from outbox_pipelines.database import connect
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.archive.history import Happened, history
from outbox_pipelines.days.partitions import ahead, close
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from outbox_pipelines.settings import Settings

_DAYS: Final = 4
_KEPT_DAYS: Final = 3


@dataclass(frozen=True, slots=True)
class Past:
    """What became of the days that are over."""

    place: Path
    """Where their files are."""
    events: int
    archived: list[date]
    size: int
    """Of their files, in bytes."""
    dropped: list[date]
    aircraft: str
    movements: list[Happened]
    """All of one aircraft, the dropped days included."""


def live(settings: Settings) -> Past:
    """Lets a few days go by.

    Raises:
        SetupError: a day could not be closed, archived or dropped; the message says why.
    """
    place = settings.local_dir.expanduser().parent / "demo-archive"
    shutil.rmtree(place, ignore_errors=True)
    settings = settings.model_copy(update={"archive": str(place), "retention_days": _KEPT_DAYS})
    events = _write(settings)
    service.relay(settings, until_empty=True, standby=service.Standby.ANY)
    for closing in close.close(settings):
        # The last hour of yesterday may be about to end.
        if not closing.closed and closing.day < _today() - timedelta(1):
            raise SetupError(f"{closing.day} stays open: {closing.why_not}")
    archived, size = [], 0
    for day in _past_days():
        size += archive.archive(settings, day).manifest.size
        proof = archive.verify(settings, day)
        if not proof.equal:
            raise SetupError("; ".join(proof.differences))
        archived.append(day)
    dropped = [drop.drop(settings, day).day for day in drop.due(settings)]
    with connect(settings, name="outbox demo: past") as connection:
        ((aircraft,),) = connection.execute(queries.WELL_TRAVELLED)
    return Past(place, events, archived, size, dropped, aircraft, history(settings, "aircraft", aircraft))


def write_a_few(settings: Settings) -> None:
    """Write what the outbox has once more, as if on the last days; publish, close and archive it."""
    days = [_today() - timedelta(n) for n in range(_DAYS, 0, -1)]
    ahead.ensure(settings, since=days[0])
    with connect(settings, name="outbox demo: past") as connection, connection.transaction():
        connection.execute(queries.DECLARE_BACKFILL)
        for day in days:
            connection.execute(queries.WRITE_AGAIN_AS_OF, {"day": day})
    # Days that stay open, or without a file, are an error on the pages. Yesterday is for who looks at them.
    service.relay(settings, until_empty=True)
    close.close(settings)
    for day in days[:-1]:
        archive.archive(settings, day)


def told(past: Past) -> dict[str, str]:
    """For the summary."""
    of_archive = sum(event.place == "archive" for event in past.movements)
    departures = [json.loads(event.payload) for event in past.movements if event.event_type == DEPARTED]
    airports = {departure["destination"] for departure in departures}
    return {
        "days gone by": f"{len(past.archived)}, with {past.events:,} events: closed, archived "
        f"({past.size / 1000:,.0f} kB) and proven; the oldest {len(past.dropped)} dropped",
        "one question": f"what has aircraft {past.aircraft} done? {len(departures):,} departures to "
        f"{len(airports)} airports; of its {len(past.movements):,} events {of_archive:,} are in the archive "
        "alone",
    }


def _write(settings: Settings) -> int:
    days = _past_days()
    ahead.ensure(settings, since=days[0])
    with connect(settings, name="outbox demo: past") as connection, connection.transaction():
        connection.execute(queries.DECLARE_BACKFILL)
        return sum(
            connection.execute(queries.WRITE_AGAIN, {"number": number, "day": day}).rowcount
            for number, day in enumerate(days)
        )


def _past_days() -> list[date]:
    return [_today() - timedelta(n) for n in range(_DAYS + 1, 1, -1)]


def _today() -> date:
    return datetime.now(UTC).date()
