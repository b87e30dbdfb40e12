"""The job and the schedule that maintain the partitions."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import dataclasses

import dagster as dg

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.events import events
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import NO_DAYS

# The table stays readable on a page of the UI.
_DAYS_SHOWN = 60


@dg.op
def make_partitions(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Create the missing partitions."""
    with one_line():
        from outbox_pipelines.partitions import ahead

        ensured = ahead.ensure(outbox_pipelines.settings())
    context.log.info(f"created {ensured.made} partitions; {ensured.ahead} future days have a partition")
    context.add_output_metadata({"made": ensured.made, "days_ahead": ensured.ahead})


@dg.op
def close_days(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Close past days, and report why the others stay open."""
    with one_line():
        from outbox_pipelines.partitions import close

        closings = close.close(outbox_pipelines.settings())
    closed = [str(each.day) for each in closings if each.closed]
    still_open = {str(each.day): each.why_not for each in closings if not each.closed}
    if closed:
        context.log.info(f"closed: {', '.join(closed)}")
    for day, why_not in still_open.items():
        context.log.warning(f"{day} stays open: {why_not}")
    context.add_output_metadata({"closed": closed, "stay_open": still_open})


@dg.op
def purge_rows(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Remove old idempotency keys, and old progress records of archived days."""
    with one_line():
        from outbox_pipelines.partitions import purge

        purged = purge.purge(outbox_pipelines.settings())
    context.add_output_metadata(dataclasses.asdict(purged))


@dg.op
def show_days(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Observe `outbox/events` with a table of the days, as `outbox partitions list` shows them."""
    with one_line():
        from outbox_pipelines.partitions import calendar

        days = calendar.read(outbox_pipelines.settings())
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
            events.key,
            metadata={
                "days": dg.MetadataValue.table(records[:_DAYS_SHOWN]),
                "attached_days": sum(day.partition == "attached" for day in days),
                "megabytes": round(sum(day.size for day in days) / 1e6, 1),
            },
        )
    )


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Creates the partitions of future days (OUTBOX_PARTITIONS_AHEAD), closes past days (by the
database's clock), and purges old idempotency keys (OUTBOX_KEY_RETENTION_DAYS) and progress.

Use: its schedule runs it every hour. Run it by hand after an outage of days, or when `outbox status` or the
check `partitions_ahead` of `outbox/health` reports too few partitions. Safe at any time, also concurrently;
it blocks no writer.

A day that stays open is not a failure: the log and the metadata of `close_days` name the reason (a running
transaction, unpublished events) and what to do; the next run retries.

When it fails: the run says in one line what to correct. It is not urgent: inserts succeed until the last
future day with a partition is over, and days that are not closed stay in the table. The job needs the
database role that owns the outbox.
""",
)
def maintain_partitions() -> None:
    # The steps are independent: partitions are created even if no day can be closed.
    make_partitions()
    close_days()
    purge_rows()
    show_days()


@dg.schedule(
    name="maintain_partitions",
    job=maintain_partitions,
    # Not on the hour, when many other jobs start.
    cron_schedule="17 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="""Runs the job `maintain_partitions` every hour.

Use: leave it on. When a run fails: see the job. Writers are not affected for two weeks, until the last future
day with a partition is over; past days are not closed until then.
""",
)
def maintain_partitions_schedule(outbox_pipelines: OutboxResource) -> dg.RunRequest | dg.SkipReason:
    """Return the run to launch. A `SetupError` fails the tick, as in `relay_supervisor`."""
    if outbox_pipelines.settings().table_file is not None:
        return dg.SkipReason(NO_DAYS)
    return dg.RunRequest()
