"""Remove archived events that are older than the retention of their aggregate type.

Invariants:
- Only days that are dropped are touched, and none is younger than the retention of the table.
- A day of which all events have expired keeps its manifest and an empty file: readers see a day that was
  emptied, not one that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from outbox_pipelines.config import parsed
from outbox_pipelines.database import connect
from outbox_pipelines.days.archive import archive_sql, identity, question, rewrite
from outbox_pipelines.days.archive.data_set import Archive
from outbox_pipelines.days.archive.rewrite import Edit, Tables
from outbox_pipelines.days.archive.store import open_store
from outbox_pipelines.days.partitions import close
from outbox_pipelines.days.partitions.calendar import DayLockedError
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings

# Of those that a manifest names.
_MOST_NAMES: Final = 100


@dataclass(frozen=True, slots=True)
class Expired:
    """The result of one day."""

    day: date
    events: int = 0
    """Events that were removed, or would be; 0 also if only an interrupted change was completed."""
    rows: int = 0
    """Events that the day had."""
    types: tuple[str, ...] = ()
    """Their aggregate types."""
    why_not: str = ""
    """Why nothing was removed."""
    is_expected: bool = False
    """Whether no action is needed, because another session works on the day."""


def expire(settings: DaySettings, *, actor: str, dry_run: bool = False) -> Iterator[Expired]:
    """Remove expired events; yield each day that has some, in order.

    Also completes changes of days that were interrupted.

    Args:
        actor: on whose behalf.
        dry_run: remove and complete nothing.

    Raises:
        SetupError: OUTBOX_ARCHIVE_RETENTION_DAYS is invalid or not set; OUTBOX_ARCHIVE is not set; this role
            does not own the outbox.
        UnavailableError: the database or the archive does not answer, or clocks differ.
    """
    store, limits = open_store(settings), parsed.archive_retention(settings)
    for day in () if dry_run else identity.unfinished_changes(settings):
        yield _tried(day, partial(_finish, settings, day))
    if not limits:
        raise SetupError(
            "no archived events expire: set OUTBOX_ARCHIVE_RETENTION_DAYS, for example to order=2557,*=3653"
        )
    with connect(settings, name="outbox archive expire") as connection:
        close.compare_clocks(connection)
        days = connection.execute(archive_sql.EXPIRABLE, {"least": min(limits.values())}).fetchall()
    archive = Archive(store)
    for day, age in days:
        expired = _tried(day, partial(_remove, settings, archive, day, age, limits, actor, dry_run))
        if expired.events or expired.why_not:
            yield expired


def _tried(day: date, act: Callable[[], Expired]) -> Expired:
    """Return what it returns; an error of one day does not stop others."""
    try:
        return act()
    except UnavailableError:
        raise
    except duckdb.Error as error:
        return Expired(day, why_not=str(question.refusal(error)))
    except (SetupError, NotReadyError) as error:
        return Expired(day, why_not=str(error), is_expected=isinstance(error, DayLockedError))


def _finish(settings: DaySettings, day: date) -> Expired:
    rewrite.finish(settings, day)
    return Expired(day)


def _remove(
    settings: DaySettings,
    archive: Archive,
    day: date,
    age: int,
    retention: Mapping[str, int],
    actor: str,
    dry_run: bool,
) -> Expired:
    counts = _counts(archive, day)
    limits = {
        aggregate_type: retention.get(aggregate_type, retention.get("*", math.inf))
        for aggregate_type in counts
    }
    types = tuple(sorted(type_name for type_name, limit in limits.items() if age > limit))
    if not types or dry_run:
        return Expired(day, sum(counts[type_name] for type_name in types), sum(counts.values()), types)
    names = types[:_MOST_NAMES] + (("…",) if len(types) > _MOST_NAMES else ())
    days = ", ".join(sorted({f"{limits[type_name]:.0f}" for type_name in types}))
    done = rewrite.rewrite(
        settings,
        day,
        _without(types),
        kind="expired",
        names=names,
        reason=f"older than {days} days (OUTBOX_ARCHIVE_RETENTION_DAYS)",
        actor=actor,
    )
    return Expired(day, done.events, done.rows, types)


def _counts(archive: Archive, day: date) -> dict[str, int]:
    """Return the number of events of a day by aggregate type; only this column is read."""
    archive.require_readable([day])
    if day not in archive.manifests:
        raise SetupError(f"{day} has no manifest in the archive: run `outbox archive verify {day}`")
    events = archive.of_days([day], columns=["aggregate_type"])
    return dict(events.aggregate("aggregate_type, count(*)").fetchall())


def _without(types: Sequence[str]) -> Edit:
    def edit(_: Path, tables: Tables) -> Tables:
        for table in tables:
            is_gone = pc.is_in(table["aggregate_type"], value_set=pa.array(types, pa.string()))
            yield table.filter(pc.invert(is_gone))

    return edit
