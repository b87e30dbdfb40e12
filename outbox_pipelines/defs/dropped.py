"""Days that are gone from the table: the asset, the job and its schedule."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time

import dagster as dg
from pydantic import Field

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.archive import archive
from outbox_pipelines.defs.events import DAYS, OWNERS
from outbox_pipelines.defs.failures import day_of, one_line
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import requests


class DropConfig(dg.Config):
    """How to drop a day."""

    early: bool = Field(
        default=False, description="also within OUTBOX_RETENTION_DAYS; it is proven all the same"
    )


# Nothing to materialize: "Materialize all" on a page would drop days.
dropped = dg.AssetSpec(
    ["outbox", "dropped"],
    partitions_def=DAYS,
    deps=[archive],
    group_name="outbox",
    owners=OWNERS,
    kinds={"postgres"},
    description="""The days that are gone from the table: past OUTBOX_RETENTION_DAYS, archived, and proven.

A partition is a UTC day. It is detached, which no writer waits for; its rows and its file are compared once
more, under a lock, and dropped in the same transaction. Dead letters stay. Nothing skips the proof.

Use: let the schedule `drop_days` do it. By hand: the job `drop_day`, alone; "Materialize all" drops nothing.

When a day is missing here: the run of `drop_day` of that day says in one line why it stays: not archived (run
`archive_day`), within the retention, in use by a long transaction (run it again), or rows and file differ:
then the error names the events, the day is a part of the outbox as before, and `outbox archive day DAY
--again` writes the file again, once you know who has changed what.
""",
)


@dg.op
def drop(context: dg.OpExecutionContext, config: DropConfig, outbox_pipelines: OutboxResource) -> None:
    """Proves and drops the day of the run's partition."""
    started = time.monotonic()
    day = day_of(context)
    with one_line():
        # Here, because definitions are to load without the drivers.
        from outbox_pipelines.archive import drop as days

        try:
            done = days.drop(outbox_pipelines.settings(), day, early=config.early)
        except days.WithinRetentionError as error:
            raise dg.Failure(
                f"{error.why}: to drop it early, launch drop_day for it with `early: true`",
                allow_retries=False,
            ) from None
    context.log_event(
        dg.AssetMaterialization(
            dropped.key,
            partition=context.partition_key,
            metadata={
                "dropped_before": not done.now,
                **({} if done.rows is None else {"rows": done.rows}),
                "seconds": round(time.monotonic() - started, 3),
            },
        )
    )


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    partitions_def=DAYS,
    description="""Drops a day that is archived, once it is proven again, and reports it to `outbox/dropped`.

Use: the schedule `drop_days` launches it for each day that is past the retention. By hand: choose a day or a
range of days in the launchpad; with `ops: {drop: {config: {early: true}}}` a day is dropped within the
retention, too. Safe for a day that is dropped already.

When it fails: the run says in one line why the day stays, and what helps; run it again afterwards.
""",
)
def drop_day() -> None:
    drop()


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
    from outbox_pipelines.archive import drop

    settings = outbox_pipelines.settings()
    if not settings.archive:
        return dg.SkipReason("no archive is named: set OUTBOX_ARCHIVE to have days archived and dropped")
    return requests(context, drop.due(settings), nothing="no day that is archived is past the retention")
