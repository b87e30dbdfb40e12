"""Compare the event catalog with the table: types and versions that are written and not documented as such.

Invariants:
- Only attached days are read: a type that is never seen can be in the archive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from outbox_pipelines.catalog.document import Catalog, EventType, require_catalog
from outbox_pipelines.config.rules import Router
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.settings import MessageSettings

# The report is not urgent: it leaves cores to the application.
TUNE: Final = "SET max_parallel_workers_per_gather = 2"

# The rows of all attached days, read once. Grouped by both types first: an aggregate with DISTINCT would
# prevent parallel workers. Of types without a list of versions, the version can be that of the aggregate, so
# that there would be as many groups as events.
TYPES: Final = """
SELECT event_type, sum(events)::bigint, min(first_at), max(last_at),
       array_agg(DISTINCT aggregate_type ORDER BY aggregate_type), array_agg(DISTINCT version)
FROM (SELECT event_type, aggregate_type, CASE WHEN event_type = ANY(%s) THEN version END AS version,
             count(*) AS events, min(created_at) AS first_at, max(created_at) AS last_at
      FROM outbox GROUP BY 1, 2, 3) each
GROUP BY event_type
ORDER BY event_type"""


Status = Literal[
    "ok", "undocumented", "retired", "misrouted", "unlisted", "deprecated", "proposed", "never seen"
]


@dataclass(frozen=True, slots=True)
class Seen:
    """The rows of an event type in the table."""

    event_type: str
    events: int
    first_at: datetime
    last_at: datetime
    aggregate_types: list[str]
    versions: list[int | None]
    """Of a type whose versions the event catalog lists."""


@dataclass(frozen=True, slots=True)
class Compared:
    """An event type, as documented and as seen."""

    event_type: str
    lifecycle: str | None
    """None if the type is not documented."""
    status: Status
    seen: Seen | None

    @property
    def is_wrong(self) -> bool:
        """Whether an operator must act: what is written, or its topic, is not what is documented."""
        return self.status in ("undocumented", "retired", "misrouted", "unlisted")


def compare(settings: MessageSettings) -> list[Compared]:
    """Return every event type that is documented or seen, by name. Reads the rows of all attached days once.

    Raises:
        SetupError: OUTBOX_CATALOG_FILE is not set, the event catalog is invalid, or the database does not
            answer or has no outbox.
    """
    catalog = require_catalog(settings)
    with connect_to_outbox(settings, name="outbox catalog") as connection:
        connection.execute(TUNE)
        versioned = [name for name, each in catalog.events.items() if each.versions]
        rows = connection.execute(TYPES, [versioned])
        return beside(catalog, (Seen(*row) for row in rows), Router(settings))


def beside(catalog: Catalog, table: Iterable[Seen], router: Router) -> list[Compared]:
    """Compare the event catalog with the given types of the table, and with the topics of the settings."""
    seen = {each.event_type: each for each in table}
    documented = catalog.events
    return [
        Compared(
            name,
            documented[name].lifecycle if name in documented else None,
            _status(name, documented.get(name), seen.get(name), router),
            seen.get(name),
        )
        for name in sorted(documented.keys() | seen)
    ]


def _status(name: str, documented: EventType | None, seen: Seen | None, router: Router) -> Status:
    if documented is None:
        return "undocumented"
    if documented.lifecycle == "retired":
        until = documented.retired_on
        # Older rows stay until their day is dropped.
        is_over = seen is None or (until is not None and seen.last_at.date() < until)
        return "ok" if is_over else "retired"
    kinds = seen.aggregate_types if seen else filter(None, [documented.aggregate_type])
    if documented.topic and any(router.topic_or_empty(kind, name) != documented.topic for kind in kinds):
        return "misrouted"
    if seen and documented.versions and {*seen.versions} - {None, documented.version, *documented.versions}:
        return "unlisted"
    if seen is None:
        return "never seen" if documented.lifecycle == "active" else "ok"
    return "ok" if documented.lifecycle == "active" else documented.lifecycle
