"""What the rows of one day look like, in a few numbers: whatever is wrong there is archived for good.

Invariants:
- One statement reads the day's rows once; its memory, and what it answers, do not grow with the day.
- Nothing here judges: what is expected of the numbers stands in `day_rules`.
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
    """The first `created_at`; None of an empty day."""
    last_at: datetime | None
    outside: int
    """Events whose time is not of this day."""
    seqs_twice: int
    """Numbers that more than one event has."""
    keys_twice: int
    """Idempotency keys that more than one event of the day has."""
    nameless: int
    """Events with an empty type, aggregate or key."""
    not_objects: int
    """Events whose payload is no JSON object; with OUTBOX_TOMBSTONES a null is none of them."""
    lacking: int
    """Events that lack a member which the schema of their type requires; 0 without a catalogue."""
    unknown_types: int
    """Event types that the catalogue does not have; 0 without one."""
    lacking_by_type: dict[str, int]
    """Of `lacking`; of the most frequent 20 types."""
    unknown_by_type: dict[str, int]
    """Events of the unknown types; of the most frequent 20."""


def measure(settings: Settings, day: date) -> DayFacts | None:
    """Counts them; None where the day's rows are gone.

    Raises:
        SetupError: the database does not answer, the outbox has no such day, or the catalogue has a mistake.
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
