"""Check that the body of each event that has a reference is there.

Invariants:
- It writes nothing. What is missing in a list of objects is asked for alone, because it may be newer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Final

from outbox_pipelines.bodies import Bodies, BodyError, UnlistableError
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.days.bodies import bodies_sql, day_references
from outbox_pipelines.days.bodies.day_references import BodyReference, StaysError
from outbox_pipelines.days.bodies.store import available, open_bodies
from outbox_pipelines.days.partitions.calendar import require_order
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.settings import DaySettings
from outbox_pipelines.writer.references import MEMBER, Reference, reference_of

DAYS: Final = 7
"""The number of past days that are checked unless others are chosen."""


@dataclass(slots=True)
class Checked:
    """The result of one day of events, or of delayed events."""

    day: date | None
    """None for delayed events."""
    references: int = 0
    size: int = 0
    """Of the bodies, in bytes."""
    problems: list[Problem] = field(default_factory=list)
    why_not: str = ""
    """Why the references could not be read."""
    is_expected: bool = False
    """Whether `why_not` needs no action."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A body that a consumer would not get."""

    event_id: str
    key: str | None
    what: str


def check(
    settings: DaySettings, since: date | None = None, until: date | None = None, *, digest: bool = False
) -> Iterator[Checked]:
    """Compare each reference of the events of these days with its body; yield each day that has references.

    First delayed events, which are of no day yet.

    Args:
        since: the first day; by default seven days before today.
        until: the last day; by default today.
        digest: also read each body, and compare its sha256.

    Raises:
        SetupError: OUTBOX_BODIES is not set.
        UnavailableError: the database, the store or the archive does not answer.
    """
    require_order(since, until)
    bodies = open_bodies(settings)
    with connect_to_outbox(settings, name="outbox bodies check") as connection, available():
        ((today,),) = connection.execute(bodies_sql.TODAY)
        first, last = since or today - timedelta(DAYS), until or today
        # Those that are moved into the outbox at this moment are read twice, and not missed.
        found = day_references.read_delayed(connection)
        yield from _checked(bodies, Checked(None), found, digest=digest)
        for place in day_references.places(connection):
            if place.day is not None and first <= place.day <= last:
                found = day_references.read(settings, connection, place)
                yield from _checked(bodies, Checked(place.day), found, digest=digest)


def _checked(
    bodies: Bodies, checked: Checked, every: Generator[BodyReference], *, digest: bool
) -> Iterator[Checked]:
    sizes = _Sizes(bodies)
    try:
        # An error of the store ends their transaction, too.
        with closing(every):
            for found in every:
                _compare(bodies, sizes, found, checked, digest=digest)
    except NotReadyError as error:
        checked.why_not, checked.is_expected = str(error), isinstance(error, StaysError)
    if checked.references or checked.why_not:
        yield checked


class _Sizes:
    """The sizes of bodies; those of a day are listed at once."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._of_days: dict[str, dict[str, int]] = {}

    def of(self, key: str) -> int | None:
        """Return the size of a body in bytes; None if it is missing."""
        day = key.partition("/")[0]
        if day not in self._of_days:
            try:
                self._of_days[day] = self._bodies.objects(date.fromisoformat(day))
            except (ValueError, UnlistableError):
                self._of_days[day] = {}
        size = self._of_days[day].get(key)
        return self._bodies.size_of(key) if size is None else size


def _compare(bodies: Bodies, sizes: _Sizes, found: BodyReference, checked: Checked, *, digest: bool) -> None:
    checked.references += 1
    what = found.unreadable
    try:
        if not what and (reference := reference_of({MEMBER: found.member})):
            checked.size += reference.size
            what = _difference(bodies, sizes, reference, digest=digest)
    except ValueError as error:
        what = str(error)
    if what:
        where = " (a part of the payload, which consumers do not fetch)" if found.is_nested else ""
        checked.problems.append(Problem(found.event_id, found.key, what + where))


def _difference(bodies: Bodies, sizes: _Sizes, reference: Reference, *, digest: bool) -> str:
    """Return what is wrong with a body; empty if nothing is."""
    size = sizes.of(reference.key)
    if size is None:
        return "the body is missing"
    if size != reference.size:
        return f"the body has {size:,} bytes in place of {reference.size:,}"
    if digest:
        try:
            bodies.get(reference)
        except BodyError as error:
            return str(error)
    return ""
