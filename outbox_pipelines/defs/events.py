"""The table that everything else is about."""

from __future__ import annotations

import dagster as dg

# The days of an outbox, today's included; UTC, as the table's partitions are. No outbox is older than the
# first release.
DAYS = dg.DailyPartitionsDefinition(start_date="2026-01-01", timezone="UTC", end_offset=1)

events = dg.AssetSpec(
    ["outbox", "events"],
    group_name="outbox",
    kinds={"postgres", "table"},
    partitions_def=DAYS,
    description="""The outbox: what applications write in the transactions of their business.

Append-only, a partition a UTC day. Applications fill it, so there is nothing to materialize here.

When inserts fail for want of a partition: run the job `maintain_partitions`, which makes the
days ahead.
When the backlog grows: see `outbox/relay`, and `outbox status` on a command line.
""",
)
