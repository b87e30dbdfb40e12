"""Days dropped from the table: the asset, the job and its schedule."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.failures import day_of, one_line
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.runs import NO_DAYS, requests
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


class DropConfig(dg.Config):
    """How to drop a day."""

    early: bool = Field(
        default=False, description="Drop the day even within OUTBOX_RETENTION_DAYS; it is still verified"
    )


# Nothing to materialize: "Materialize all" on a page would drop days.
_DROPPED: Final = """\
The days dropped from the table: past OUTBOX_RETENTION_DAYS, archived, and verified.

A partition is a UTC day. It is detached, which blocks no writer; its rows and its file are compared once
more, under a lock, and the rows are dropped in the same transaction. Dead letters stay. Nothing skips this
comparison.

Use: let the schedule `drop_days` do it. By hand: only the job `drop_day`; "Materialize all" drops nothing.

When a day is missing here: the run of `drop_day` for that day says in one line why it stays. It is not
archived (run `archive_day`), is within the retention, or is in use by a long transaction (run the job again);
or rows and file differ. In that case the error names the events, and the day remains part of the outbox. Find
out who changed what, then `outbox archive day DAY --again` writes the file again.
"""


def dropped(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `dropped`."""

    return dg.AssetSpec(
        outbox.key("dropped"),
        partitions_def=outbox.days,
        deps=[outbox.key("archive")],
        group_name=outbox.asset_group,
        tags=outbox.asset_tags,
        owners=outbox.owners,
        kinds={"postgres"},
        description=outbox.text(_DROPPED),
    )


def drop(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `drop`."""

    @dg.op(name=outbox.name_of("drop"), pool=outbox.pool)
    def drop(context: dg.OpExecutionContext, config: DropConfig) -> None:
        """Verify and drop the day of the run's partition."""
        started = time.monotonic()
        day = day_of(context)
        with one_line(outbox):
            # Imported here so that definitions load without the drivers.
            from outbox_pipelines.days.archive import drop as days

            try:
                done = days.drop(outbox.load_settings(), day, early=config.early)
            except days.WithinRetentionError as error:
                raise dg.Failure(
                    f"{error.why}: to drop it early, launch drop_day for it with `early: true`",
                    allow_retries=False,
                ) from None
        context.log_event(
            dg.AssetMaterialization(
                outbox.key("dropped"),
                partition=context.partition_key,
                metadata={
                    "dropped_before": not done.now,
                    **({} if done.rows is None else {"rows": done.rows}),
                    "seconds": round(time.monotonic() - started, 3),
                },
            )
        )

    return drop


_DROP_DAY: Final = """\
Drops an archived day after verifying it again, and reports it to `outbox/dropped`.

Use: the schedule `drop_days` launches it for each day that is past the retention. By hand: choose a day or a
range of days in the launchpad; `ops: {drop: {config: {early: true}}}` also drops a day within the retention.
Safe for a day that is already dropped.

When it fails: the run says in one line why the day stays and what to do; run it again afterwards.
"""


def drop_day(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `drop_day`."""

    @outbox.job("drop_day", _DROP_DAY, partitions_def=outbox.days, repeats=False)
    def drop_day() -> None:
        drop(outbox).alias("drop")()

    return drop_day


_DROP_DAYS: Final = """\
Launches `drop_day` every hour for each archived day that is past OUTBOX_RETENTION_DAYS. Leave it on. A day
whose file and rows differ stays in the table and fails every hour: see its run. A skipped tick says what to
correct.
"""


def drop_days(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `drop_days`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        from outbox_pipelines.days.archive import drop

        if not kinds.of(settings).has_days:
            return dg.SkipReason(NO_DAYS)
        if not settings.archive:
            return dg.SkipReason("no archive configured: set OUTBOX_ARCHIVE to archive and drop days")
        return requests(context, outbox, drop.due(settings), nothing="no archived day is past the retention")

    # After `archive_days`, and not on the hour, when many other jobs start.
    return ticks.schedule(outbox, "drop_days", "drop_day", "52 * * * *", _DROP_DAYS, one)
