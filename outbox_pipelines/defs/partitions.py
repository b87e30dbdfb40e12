"""The jobs and schedules that maintain the partitions and drop days, and the asset of the dropped days."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import dataclasses
import time
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.jobs import job, op_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import day_of, one_line
from outbox_pipelines.defs.runs import requests

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


# The table stays readable on a page of the UI.
_DAYS_SHOWN = 60
_MAINTAIN_PARTITIONS: Final = """\
Creates the partitions of future days (OUTBOX_PARTITIONS_AHEAD), closes past days (by the
database's clock), and purges old idempotency keys (OUTBOX_IDEMPOTENCY_KEY_RETENTION_DAYS) and progress.

Use: its schedule runs it every hour. Run it by hand after an outage of days, or when `outbox status` or the
check `partitions_ahead` of `outbox/health` reports too few partitions. Safe at any time, also concurrently;
it blocks no writer.

A day that stays open is not a failure: the log and the metadata of `close_days` name the reason (a running
transaction, unpublished events) and what to do; the next run retries.

When it fails: the run says in one line what to correct. It is not urgent: inserts succeed until the last
future day with a partition is over, and days that are not closed stay in the table. The job needs the
database role that owns the outbox.
"""
_MAINTAIN_PARTITIONS_SCHEDULE: Final = """\
Runs the job `maintain_partitions` every hour. Leave it on. When a run fails, writers are not affected for two
weeks; past days are not closed until then.
"""
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
out who changed what: if the rows are correct, `outbox archive day DAY --again` writes the file again.
"""
_DROP_DAY: Final = """\
Drops an archived day after verifying it again, and reports it to `outbox/dropped`.

Use: the schedule `drop_days` launches it for each day that is past the retention. By hand: choose a day or a
range of days in the launchpad; `ops: {drop: {config: {early: true}}}` also drops a day within the retention.
Safe for a day that is already dropped.

When it fails: the run says in one line why the day stays and what to do; run it again afterwards.
"""
_DROP_DAYS: Final = """\
Launches `drop_day` every hour for each archived day that is past OUTBOX_RETENTION_DAYS. Leave it on. A day
whose file and rows differ stays in the table and fails every hour: see its run. A skipped tick says what to
correct.
"""


def make_partitions(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `make_partitions`."""

    @dg.op(name=outbox.name_of("make_partitions"))
    def make_partitions(context: dg.OpExecutionContext) -> None:
        """Create the missing partitions."""
        with one_line(outbox):
            from outbox_pipelines.days.partitions import ahead

            ensured = ahead.ensure(outbox.load_settings())
        context.log.info(
            f"created {counted(ensured.made, 'partition')}; future days with a partition: {ensured.ahead}"
        )
        context.add_output_metadata({"made": ensured.made, "partitions_ahead": ensured.ahead})

    return make_partitions


def close_days(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `close_days`."""

    @dg.op(name=outbox.name_of("close_days"))
    def close_days(context: dg.OpExecutionContext) -> None:
        """Close past days, and report why the others stay open."""
        with one_line(outbox):
            from outbox_pipelines.days.partitions import close

            closings = close.close(outbox.load_settings())
        closed = [str(each.day) for each in closings if each.closed]
        still_open = {str(each.day): each.why_not for each in closings if not each.closed}
        if closed:
            context.log.info(f"closed: {', '.join(closed)}")
        for day, why_not in still_open.items():
            context.log.warning(plain(f"{day} stays open: {why_not}"))
        context.add_output_metadata({"closed": closed, "stay_open": still_open})

    return close_days


def purge_rows(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `purge_rows`."""

    @dg.op(name=outbox.name_of("purge_rows"))
    def purge_rows(context: dg.OpExecutionContext) -> None:
        """Remove old idempotency keys, and old progress records of archived days."""
        with one_line(outbox):
            from outbox_pipelines.days.partitions import close

            purged = close.purge(outbox.load_settings())
        context.add_output_metadata(dataclasses.asdict(purged))

    return purge_rows


def show_days(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `show_days`."""

    @dg.op(name=outbox.name_of("show_days"))
    def show_days(context: dg.OpExecutionContext) -> None:
        """Observe `outbox/events` with a table of the days, as `outbox partitions list` shows them."""
        with one_line(outbox):
            from outbox_pipelines.days.partitions import calendar

            days = calendar.read(outbox.load_settings())
        records = [
            dg.TableRecord(
                {
                    "day": str(day.day),
                    "state": day.state,
                    "rows": day.rows,
                    "megabytes": round(day.size / 1e6, 1),
                    "archived": str(day.archived_at or "")[:19],
                    "proven": str(day.proven_at or "")[:19],
                }
            )
            for day in reversed(days)
        ]
        context.log_event(
            dg.AssetObservation(
                outbox.key("events"),
                metadata={
                    "days": dg.MetadataValue.table(records[:_DAYS_SHOWN]),
                    "attached_days": sum(day.partition == "attached" for day in days),
                    "megabytes": round(sum(day.size for day in days) / 1e6, 1),
                },
            )
        )

    return show_days


def maintain_partitions(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `maintain_partitions`."""

    @job(outbox, "maintain_partitions", _MAINTAIN_PARTITIONS)
    def maintain_partitions() -> None:
        # The steps are independent: partitions are created even if no day can be closed.
        make_partitions(outbox).alias("make_partitions")()
        close_days(outbox).alias("close_days")()
        purge_rows(outbox).alias("purge_rows")()
        show_days(outbox).alias("show_days")()

    return maintain_partitions


def maintain_partitions_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `maintain_partitions_schedule`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        return dg.RunRequest()

    # Not on the hour, when many other jobs start.
    text = _MAINTAIN_PARTITIONS_SCHEDULE
    return ticks.schedule(outbox, "maintain_partitions", "17 * * * *", text, one, of_days=True)


class DropConfig(dg.Config):
    """How to drop a day."""

    early: bool = Field(
        default=False, description="Drop the day even within OUTBOX_RETENTION_DAYS; it is still verified"
    )


def dropped(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `dropped`."""
    return outbox.spec("dropped", _DROPPED, {"postgres"}, deps=["archive"], partitions_def=outbox.days)


def drop_day(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `drop_day`."""

    @op_job(outbox, "drop_day", _DROP_DAY, partitions_def=outbox.days, repeats=False, pool=outbox.pool)
    def drop(context: dg.OpExecutionContext, config: DropConfig) -> None:
        """Verify and drop the day of the run's partition."""
        started = time.monotonic()
        day = day_of(context)
        with one_line(outbox):
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


def drop_days(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `drop_days`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        from outbox_pipelines.days.archive import drop

        if not settings.archive:
            return dg.SkipReason("no archive configured: set OUTBOX_ARCHIVE to archive and drop days")
        return requests(context, outbox, drop.due(settings), nothing="no archived day is past the retention")

    # After `archive_days`, and not on the hour, when many other jobs start.
    return ticks.schedule(outbox, "drop_days", "52 * * * *", _DROP_DAYS, one, job="drop_day", of_days=True)
