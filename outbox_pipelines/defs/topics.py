"""Assets that Dagster only shows: the application's tables, the outbox, and the topics of Kafka.

Topics are those of the event catalog, and those to which relay sessions have published.

Invariants:
- Definitions load even if the settings, the event catalog or Dagster's storage are faulty: then there are
  fewer topics.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import dagster as dg

from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.catalog.document import EventType


_APPLICATION_TABLES: Final = """\
The application's own tables: what its business transactions change.

Each business transaction also writes its events into `outbox/events`; both commit, or neither does. Dagster
reads and materializes nothing here; the asset shows where the data originates.

When an event for a change is missing: `outbox lint-writes` finds code that changes data without an event;
see docs/writing-events.md.
"""


def application_tables(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `application_tables`."""

    return dg.AssetSpec(
        outbox.outer_key("application", "tables"),
        group_name=outbox.group_of("application"),
        tags=outbox.asset_tags,
        kinds={"postgres", "table"},
        description=outbox.text(_APPLICATION_TABLES),
    )


_EVENTS: Final = """\
The outbox: the events that applications write in their business transactions.

Append-only, with a partition for each UTC day. The page shows the past days, from the outbox's first day as
of when the code location was loaded. Applications fill the table, so there is nothing to materialize here.

When inserts fail because a partition is missing: run the job `maintain_partitions`, which creates the
days ahead.
When the backlog grows: see `outbox/relay`, and `outbox status` on a command line.
"""


_TABLE: Final = """\
The existing outbox table (OUTBOX_TABLE): the events that applications write in their business transactions.

Its rows say what is published. Applications fill the table, so there is nothing to materialize here.

When the backlog grows: see `outbox/relay`, and `outbox status` on a command line.
"""


def events(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `events`."""

    return dg.AssetSpec(
        outbox.key("events"),
        deps=[outbox.outer_key("application", "tables")],
        group_name=outbox.asset_group,
        tags=outbox.asset_tags,
        owners=outbox.owners,
        kinds={"postgres", "table"},
        partitions_def=None if outbox.is_existing_table else outbox.days,
        description=outbox.text(_TABLE if outbox.is_existing_table else _EVENTS),
    )


_PREFIX: Final = "topic"
# Owners that Dagster accepts; any other is only named in the description.
_OWNER: Final = re.compile(r"team:.+|[\w.+-]+@[\w-]+(\.[\w-]+)+")
_LOG: Final = logging.getLogger(__name__)


def topic_key(outbox: Outbox, name: str) -> dg.AssetKey:
    """Return the key of a topic's asset."""
    return outbox.outer_key(_PREFIX, name)


def topics(outbox: Outbox) -> list[dg.AssetSpec]:
    """Return an external asset for each topic that is known when the definitions load."""
    documented = _documented(outbox)
    return [
        _topic(outbox, name, documented.get(name, {})) for name in sorted(documented.keys() | _seen(outbox))
    ]


def _documented(outbox: Outbox) -> dict[str, dict[str, EventType]]:
    """Return the event types of each topic in the event catalog."""
    found: dict[str, dict[str, EventType]] = {}
    if not outbox.is_set("catalog_file"):
        return found
    try:
        settings = outbox.load_settings()
        if settings.catalog_file is not None:
            from outbox_pipelines.catalog.document import require_catalog

            for name, each in require_catalog(settings).events.items():
                if each.topic is not None:
                    found.setdefault(each.topic, {})[name] = each
    except SetupError as error:
        # `check_catalog`, and every job that reads the settings, reports the same error to the user.
        _LOG.debug("topics of the event catalog not loaded: %s", error)
    return found


def _seen(outbox: Outbox) -> set[str]:
    """Return the topics that relay sessions of the outbox have reported."""
    *prefix, _ = topic_key(outbox, "").path
    home = os.environ.get("DAGSTER_HOME")
    return {path[-1] for path in (_keys(home) if home else ()) if list(path[:-1]) == prefix}


@lru_cache(maxsize=1)
def _keys(home: str) -> list[Sequence[str]]:
    """Return the keys of all assets in Dagster's storage, read once for all outboxes of a process."""
    try:
        with dg.DagsterInstance.get() as instance:
            return [key.path for key in instance.get_asset_keys()]
    except Exception as error:  # noqa: BLE001 - whatever its storage raises
        _LOG.warning("topics of earlier sessions are not shown: cannot read Dagster's storage: %s", error)
        return []


def _topic(outbox: Outbox, name: str, types: dict[str, EventType]) -> dg.AssetSpec:
    lines = "\n".join(_lines(types)) or _UNDOCUMENTED
    return dg.AssetSpec(
        topic_key(outbox, name),
        deps=[outbox.key("relay")],
        group_name=outbox.group_of("topics"),
        tags=outbox.asset_tags,
        kinds={"kafka"},
        owners=sorted({each.owner for each in types.values() if _OWNER.fullmatch(each.owner)}),
        description=outbox.text(_DESCRIPTION.format(name=name, types=lines)),
        metadata={"event_types": dg.MetadataValue.md(_page(types))} if types else None,
    )


def _page(types: dict[str, EventType]) -> str:
    """Return the page of the event catalog with the types of one topic."""
    from outbox_pipelines.catalog.document import Catalog
    from outbox_pipelines.catalog.page import markdown

    return markdown(Catalog(events=types))


def _lines(types: dict[str, EventType]) -> list[str]:
    return [
        f"- `{name}` ({each.lifecycle}): {each.description.strip()} From {each.producer}, "
        f"for {', '.join(each.consumers) or 'no known consumer'}; owner: {each.owner}."
        for name, each in types.items()
    ]


_UNDOCUMENTED: Final = "No event type in the event catalog (OUTBOX_CATALOG_FILE) names this topic."
_DESCRIPTION: Final = """\
The topic `{name}`, to which the relay publishes. Relay sessions observe it.

{types}

Use: see who produces and who consumes its events; the metadata `event_types` has each event type's fields.
A topic appears here when the code location is reloaded after the first session that published to it.

When consumers miss events: see `outbox/relay` for the lag, and `outbox status` for parked events.
"""
