"""Count the properties of one day's rows before they are archived.

Invariants:
- One statement reads the day's rows once; its memory and its result do not grow with the day.
- Nothing here judges: the expectations are in `day_rules`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime

from psycopg.rows import class_row

from outbox_pipelines.catalog.document import Catalog, require_catalog
from outbox_pipelines.database import connect
from outbox_pipelines.partitions.calendar import bounds_of, leaf_of, require_day
from outbox_pipelines.quality import day_queries
from outbox_pipelines.schema import require_schema
from outbox_pipelines.settings import Settings


@dataclass(frozen=True, slots=True)
class DayFacts:
    """The events of one day, counted."""

    events: int
    types: int
    """Event types."""
    first_at: datetime | None
    """The first `created_at`; None for an empty day."""
    last_at: datetime | None
    outside: int
    """Events whose time is not of this day."""
    seqs_twice: int
    """Numbers (`seq`) that more than one event has."""
    keys_twice: int
    """Idempotency keys that more than one event of the day has."""
    nameless: int
    """Events with an empty type, aggregate or key."""
    not_objects: int
    """Events whose payload is not a JSON object; with OUTBOX_TOMBSTONES a null is not counted."""
    lacking: int
    """Events that lack a member required by the schema of their type; 0 without an event catalog."""
    unknown_types: int
    """Event types that are not in the event catalog; 0 without one."""
    lacking_by_type: dict[str, int]
    """`lacking` by type, for the 20 types with the most."""
    unknown_by_type: dict[str, int]
    """Events of the unknown types, for the 20 types with the most."""


def measure(settings: Settings, day: date) -> DayFacts | None:
    """Return the facts of a day; None if its rows are dropped.

    Raises:
        SetupError: the database is unavailable, the outbox has no such day, or the event catalog is invalid.
    """
    require_schema(settings)
    catalog = None if settings.catalog_file is None else require_catalog(settings)
    start, stop = bounds_of(day)
    with connect(settings, name=f"outbox quality: {day}") as connection:
        connection.execute(day_queries.TUNE)
        require_day(connection, day)
        leaf = leaf_of(day)
        ((exists,),) = connection.execute(day_queries.EXISTS, {"leaf": leaf})
        if not exists:
            return None
        query = day_queries.of_day(day_queries.FACTS, leaf, start=start, stop=stop)
        return (
            connection.cursor(row_factory=class_row(DayFacts))
            .execute(query, _given(settings, catalog))
            .fetchone()
        )


def _given(settings: Settings, catalog: Catalog | None) -> dict[str, object]:
    documented = {} if catalog is None else catalog.events
    return {
        "required": json.dumps({name: each.required for name, each in documented.items() if each.required}),
        "known": None if catalog is None else list(documented),
        "tombstones": settings.tombstones,
        "most": day_queries.MOST_NAMED,
    }
