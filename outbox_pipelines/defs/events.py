"""The assets of the outbox table and of the application's own tables."""

from __future__ import annotations

import dagster as dg

from outbox_pipelines.defs.first_day import first_day

# The past days of an outbox; UTC, like the table's partitions. Other days would show as missing, and a run of
# one would fail.
DAYS = dg.DailyPartitionsDefinition(start_date=str(first_day()), timezone="UTC")

# A searchable name; replace it with your own in a fork.
OWNERS = ["team:outbox"]

application_tables = dg.AssetSpec(
    ["application", "tables"],
    group_name="application",
    kinds={"postgres", "table"},
    description="""The application's own tables: what its business transactions change.

Each business transaction also writes its events into `outbox/events`; both commit, or neither does. Dagster
reads and materializes nothing here; the asset shows where the data originates.

When an event for a change is missing: `outbox lint-writes` finds code that changes data without an event;
see docs/writing-events.md.
""",
)

events = dg.AssetSpec(
    ["outbox", "events"],
    deps=[application_tables],
    group_name="outbox",
    owners=OWNERS,
    kinds={"postgres", "table"},
    partitions_def=DAYS,
    description="""The outbox: the events that applications write in their business transactions.

Append-only, with a partition for each UTC day. The page shows the past days, from the outbox's first day as
of when the code location was loaded. Applications fill the table, so there is nothing to materialize here.

When inserts fail because a partition is missing: run the job `maintain_partitions`, which creates the
days ahead.
When the backlog grows: see `outbox/relay`, and `outbox status` on a command line.
""",
)
