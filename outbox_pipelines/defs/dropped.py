"""Days that are gone from the table: the asset, the job and its schedule."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time
from datetime import date
from typing import Any

import dagster as dg
from pydantic import Field

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.archive import archive
from outbox_pipelines.defs.events import DAYS, OWNERS
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import requests


class DropConfig(dg.Config):
    """How to drop a day."""

    early: bool = Field(
        default=False, description="also within OUTBOX_RETENTION_DAYS; it is proven all the same"
    )


@dg.asset(
    key=["outbox", "dropped"],
    partitions_def=DAYS,
    deps=[archive],
    group_name="outbox",
    owners=OWNERS,
    kinds={"postgres"},
    description="""The days that are gone from the table: past OUTBOX_RETENTION_DAYS, archived, and proven.

A partition is a UTC day. It is detached, which no writer waits for; its rows and its file are compared once
more, under a lock, and dropped in the same transaction. Dead letters stay. Nothing skips the proof.

Use: let the schedule `drop_days` do it. By hand: the job `drop_day`; with `early: true` in the launchpad a
day goes before its time.

When it fails: the error says in one line why the day stays: not archived (run `archive_day`), within the
retention, in use by a long transaction (run it again), or rows and file differ: then the error names the
events, the day is a part of the outbox as before, and `outbox archive day DAY --again` writes the file anew,
once you know who has changed what.
""",
)
def dropped(
    context: dg.AssetExecutionContext, config: DropConfig, outbox_pipelines: OutboxResource
) -> dg.MaterializeResult[Any]:
    started = time.monotonic()
    with one_line():
        # Here, because definitions are to load without the drivers.
        from outbox_pipelines.partitions import drop

        done = drop.drop(
            outbox_pipelines.settings(), date.fromisoformat(context.partition_key), early=config.early
        )
    return dg.MaterializeResult(
        metadata={
            "dropped_before": not done.now,
            **({} if done.rows is None else {"rows": done.rows}),
            "seconds": round(time.monotonic() - started, 3),
        }
    )


drop_day = dg.define_asset_job(
    "drop_day",
    selection=dg.AssetSelection.assets(dropped),
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Drops a day that is archived, once it is proven again: the asset `outbox/dropped`.

Use: the schedule `drop_days` launches it for each day that is past the retention. By hand: choose a day or a
range of days in the launchpad. Safe for a day that is dropped already.

When it fails: the run says in one line why the day stays, and what helps; run it again afterwards.
""",
)


@dg.schedule(
    name="drop_days",
    job=drop_day,
    # After `archive_days`, and off the full hour, when everybody's jobs start.
    cron_schedule="52 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="""Launches `drop_day` for each archived day that is past OUTBOX_RETENTION_DAYS, every hour.

Use: leave it on. A day that is not proven stays, fails each hour, and needs somebody to look: see its run.

When a tick fails: its error says in one line what to mend (settings, database, schema). Nothing is lost: days
stay in the table until they are dropped.
""",
)
def drop_days(
    context: dg.ScheduleEvaluationContext, outbox_pipelines: OutboxResource
) -> list[dg.RunRequest] | dg.SkipReason:
    """A tick. `SetupError` is left to fail it, as in `relay_supervisor`."""
    from outbox_pipelines.partitions import drop

    settings = outbox_pipelines.settings()
    if not settings.archive:
        return dg.SkipReason("no archive is named: set OUTBOX_ARCHIVE to have days archived and dropped")
    return requests(context, drop.due(settings), nothing="no day that is archived is past the retention")
