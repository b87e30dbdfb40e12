"""Remove bodies that no event refers to: those of transactions that were rolled back.

Invariants:
- A body to which an event refers is never removed, wherever the event is: in the table, attached or not,
  among parked or delayed events, or in the archive.
- The objects of a day are listed first. Then it is certain that no transaction can still commit a reference
  to one of them: the day and the next one are closed, no transaction from before their end runs, and none
  that wrote events is prepared.
- Then references are read: those of the day and, if objects are left, of each place that a row could have
  been written into since. What cannot be read completely protects all objects of the day.
- Nothing is remembered: after an interruption, the next sweep begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Final

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.database import Connection
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.bodies import bodies_sql, day_references
from outbox_pipelines.days.bodies.day_references import StaysError
from outbox_pipelines.days.bodies.store import available, open_bodies, require_own
from outbox_pipelines.days.partitions import close
from outbox_pipelines.days.partitions.calendar import DayLockedError, require_order, working_at
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.settings import DaySettings

_LOG = logging.getLogger(__name__)
DAYS: Final = 7
"""The number of past days that are swept unless others are chosen: older ones have been swept by then."""
_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of one day."""

    day: date
    objects: int
    """Bodies of the day that there were; 0 if they cannot be listed."""
    unreferenced: int
    """Of these, what no event refers to; removed unless it was a dry run."""
    size: int
    """Of the unreferenced, in bytes."""
    why_not: str = ""
    """Why nothing was removed."""
    is_expected: bool = False
    """Whether no action is needed, for example because the day is not over."""


def sweep(
    settings: DaySettings, since: date | None = None, until: date | None = None, *, dry_run: bool = False
) -> Iterator[Swept]:
    """Remove the bodies of each day to which no event refers; yield each day that has bodies, in order.

    Args:
        since: the first day; by default seven days before today.
        until: the last day; by default today.
        dry_run: remove nothing.

    Raises:
        SetupError: the store is not this outbox's, or OUTBOX_BODIES is not set.
        UnavailableError: the database, the store or the archive does not answer.
    """
    require_order(since, until)
    bodies = open_bodies(settings)
    with connect_to_outbox(settings, name="outbox bodies sweep") as connection:
        close.compare_clocks(connection)
        require_own(bodies, connection)
        ((today,),) = connection.execute(bodies_sql.TODAY)
    first, last = since or today - timedelta(DAYS), until or today
    with available():
        days = bodies.days(first, last)
    for day in days:
        try:
            with available():
                objects = bodies.objects(day)
        except NotReadyError as error:
            yield Swept(day, 0, 0, 0, str(error))
            continue
        if not objects:
            continue
        try:
            left = _sweep(settings, bodies, day, objects, dry_run=dry_run)
        except NotReadyError as error:
            is_expected = isinstance(error, StaysError | DayLockedError)
            yield Swept(day, len(objects), 0, 0, str(error), is_expected)
        else:
            yield Swept(day, len(objects), len(left), sum(left.values()))


def _sweep(
    settings: DaySettings, bodies: Bodies, day: date, objects: dict[str, int], *, dry_run: bool
) -> dict[str, int]:
    """Remove objects of a day; return those that no event refers to, with their sizes."""
    with working_at(settings, day) as connection:
        _require_over(connection, day)
        left = _unreferenced(settings, connection, day, objects)
        keys = iter([] if dry_run else left)
        while some := [*islice(keys, _AT_ONCE)]:
            with available():
                bodies.remove(some)
            _LOG.info("%s: %d objects removed that no event refers to", day, len(some))
    return left


def _require_over(connection: Connection, day: date) -> None:
    """Raise `NotReadyError` if a transaction could still commit a reference to a body of this day."""
    _require_not_adopted(connection, day)
    ((today,),) = connection.execute(bodies_sql.TODAY)
    following = day + timedelta(1)
    if following >= today:
        raise StaysError("the next day is not over: a later sweep does it")
    states = {place.day: place.state for place in day_references.places(connection)}
    if day not in states:
        raise NotReadyError(
            "it is not a day of this outbox, so its references are not known: see `outbox partitions list`"
        )
    # A writer of another language may have taken the day from its own clock, or before its transaction.
    for checked_day in (day, following):
        if states.get(checked_day) == "open":
            raise StaysError(f"{checked_day} is not closed: see `outbox partitions close {checked_day}`")
    # Closing has proven it for rows of the days themselves. A row of a backfill may be in any other day.
    if why := close.still_running(connection, following):
        raise StaysError(why)
    for (name,) in connection.execute(bodies_sql.PREPARED).fetchall():
        raise StaysError(f"a prepared transaction has written events: COMMIT or ROLLBACK PREPARED '{name}'")


def _require_not_adopted(connection: Connection, day: date) -> None:
    """Raise `NotReadyError` if writers wrote this day's events into a table that `outbox adopt` replaces."""
    if connection.execute(bodies_sql.ADOPTION_EXISTS).fetchone() != (True,):
        return
    for table, state, switched in connection.execute(bodies_sql.ADOPTED).fetchall():
        if switched is None or state in ("prepared", "returning"):
            raise StaysError(f"writers may write into {table}, which `outbox adopt` has not replaced")
        if day <= switched:
            raise StaysError(f"writers wrote into {table} until {switched}: its bodies stay")


def _unreferenced(
    settings: DaySettings, connection: Connection, day: date, objects: dict[str, int]
) -> dict[str, int]:
    """Return the objects that no event refers to."""
    left = {day_references.name_of(key): key for key in objects}

    def keep(names: Iterator[str]) -> None:
        for name in names:
            left.pop(name, None)

    keep(day_references.delayed(connection))
    places = day_references.places(connection)
    for place in sorted(places, key=lambda each: each.day != day):
        if place.day == day or (left and _may_refer(place, day)):
            keep(day_references.mentioned(settings, connection, place))
    if left:
        keep(day_references.parked(connection))
    return {key: objects[key] for key in left.values()}


def _may_refer(place: day_references.DayPlace, day: date) -> bool:
    """Return whether a row of this place can have been written since the day's bodies were."""
    began = datetime.combine(day - timedelta(1), datetime.min.time(), UTC)
    return place.closed_at is None or place.closed_at >= began
