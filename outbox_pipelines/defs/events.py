"""The assets of the outbox table and of the application's own tables."""

from __future__ import annotations

from typing import Final

import dagster as dg

from outbox_pipelines.defs.outbox import Outbox

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


def events(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `events`."""

    return dg.AssetSpec(
        outbox.key("events"),
        deps=[outbox.outer_key("application", "tables")],
        group_name=outbox.asset_group,
        tags=outbox.asset_tags,
        owners=outbox.owners,
        kinds={"postgres", "table"},
        partitions_def=outbox.days,
        description=outbox.text(_EVENTS),
    )
