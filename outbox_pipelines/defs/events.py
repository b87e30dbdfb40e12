"""The table that everything else is about, and those beside which it is written."""

from __future__ import annotations

import dagster as dg

from outbox_pipelines.defs.first_day import first_day

# The days of an outbox that are over; UTC, as the table's partitions are. Others would show as missing, and a
# run of one would fail.
DAYS = dg.DailyPartitionsDefinition(start_date=str(first_day()), timezone="UTC")

# A name to search for, and to fork with your own.
OWNERS = ["team:outbox"]

application_tables = dg.AssetSpec(
    ["application", "tables"],
    group_name="application",
    kinds={"postgres", "table"},
    description="""The application's own tables: what its business transactions change.

Each such transaction writes its events into `outbox/events` as well, and both commit or neither does. Dagster
reads and makes nothing here; it stands for where everything begins.

When events are missing that should tell of a change: `outbox lint-writes` finds code that writes the one
without the other; see docs/writing-events.md.
""",
)

events = dg.AssetSpec(
    ["outbox", "events"],
    deps=[application_tables],
    group_name="outbox",
    owners=OWNERS,
    kinds={"postgres", "table"},
    partitions_def=DAYS,
    description="""The outbox: what applications write in the transactions of their business.

Append-only, a partition a UTC day; shown are those that are over, from the outbox's first one as of when the
code location was loaded. Applications fill it, so there is nothing to materialize here.

When inserts fail for want of a partition: run the job `maintain_partitions`, which makes the
days ahead.
When the backlog grows: see `outbox/relay`, and `outbox status` on a command line.
""",
)
