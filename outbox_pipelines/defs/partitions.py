"""The job and the schedule that look after the days."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import dataclasses

import dagster as dg

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.events import events
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.resources import OutboxResource

# A page of the UI shows so many rows without scrolling for ever.
_DAYS_SHOWN = 60


@dg.op
def make_partitions(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Makes what is missing."""
    with one_line():
        from outbox_pipelines.partitions import ahead

        ensured = ahead.ensure(outbox_pipelines.settings())
    context.log.info(f"made {ensured.made} partitions; {ensured.ahead} days ahead have one")
    context.add_output_metadata({"made": ensured.made, "days_ahead": ensured.ahead})


@dg.op
def close_days(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Closes the days that are over, and says of the others why they stay open."""
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
    """Removes old idempotency keys, and what tells of days that are long archived."""
    with one_line():
        from outbox_pipelines.partitions import purge

        purged = purge.purge(outbox_pipelines.settings())
    context.add_output_metadata(dataclasses.asdict(purged))


@dg.op
def show_days(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Observes `outbox/events` with a table of the days, as `outbox partitions list` shows them."""
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
    description="""Makes the partitions of the days ahead (OUTBOX_PARTITIONS_AHEAD), closes the days that
are over, by the database's clock, and purges old idempotency keys (OUTBOX_KEY_RETENTION_DAYS) and progress.

Use: its schedule runs it every hour. By hand after an outage of days, or when `outbox status` or the
check `partitions_ahead` of `outbox/health` says that there are few. Safe at any time, and by two at once; no
writer waits.

A day that stays open is no failure: the log and the metadata of `close_days` say what stands against it (a
transaction that still runs, events that are not published) and what helps; the next run tries again.

When it fails: the run says what to mend in one line. There is time: until the last day ahead is over, nothing
fails, and days that are not closed stay in the table. It needs the database role that owns the outbox.
""",
)
def maintain_partitions() -> None:
    # None waits for another: days are made where none can be closed.
    make_partitions()
    close_days()
    purge_rows()
    show_days()


maintain_partitions_schedule = dg.ScheduleDefinition(
    name="maintain_partitions",
    job=maintain_partitions,
    # Off the full hour, when everybody's jobs start.
    cron_schedule="17 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="""Runs the job `maintain_partitions` every hour.

Use: leave it on. When a run fails: see the job; a failure has two weeks to be seen, until the last day ahead
is over, and days that are over wait meanwhile.
""",
)
