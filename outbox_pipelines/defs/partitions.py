"""The job and the schedule that look after the days, and the check that there are days ahead."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import dataclasses
from typing import Any

import dagster as dg

from outbox_pipelines.defs.events import events
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.resources import OutboxResource

_CHECK = "partitions_ahead"


@dg.asset_check(
    asset=events.key,
    name=_CHECK,
    description="""Whether at least 7 days ahead have a partition.

An insert into a day without one fails, and the business transaction with it. The job `maintain_partitions`
reports this check each time; here it can be run by hand.

When it fails: run the job `maintain_partitions`, or `outbox partitions ensure`; its error says what is wrong.
""",
)
def partitions_ahead(outbox: OutboxResource) -> dg.AssetCheckResult:
    # Here, because definitions are to load without the drivers.
    from outbox_pipelines.database import connect
    from outbox_pipelines.partitions import calendar

    with connect(outbox.settings(), name="outbox partitions") as connection:
        return dg.AssetCheckResult(**_verdict(calendar.ahead(connection)))


@dg.op
def make_partitions(context: dg.OpExecutionContext, outbox: OutboxResource) -> None:
    """Makes what is missing, and reports the check."""
    with one_line():
        from outbox_pipelines.partitions import ahead

        ensured = ahead.ensure(outbox.settings())
    context.log.info(f"made {ensured.made} partitions; {ensured.ahead} days ahead have one")
    context.add_output_metadata({"made": ensured.made, "days_ahead": ensured.ahead})
    context.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(asset_key=events.key, check_name=_CHECK, **_verdict(ensured.ahead))
    )


@dg.op
def close_days(context: dg.OpExecutionContext, outbox: OutboxResource) -> None:
    """Closes the days that are over, and says of the others why they stay open."""
    with one_line():
        from outbox_pipelines.partitions import close

        closings = close.close(outbox.settings())
    closed = [str(each.day) for each in closings if each.closed]
    still_open = {str(each.day): each.why_not for each in closings if not each.closed}
    if closed:
        context.log.info(f"closed: {', '.join(closed)}")
    for day, why_not in still_open.items():
        context.log.warning(f"{day} stays open: {why_not}")
    context.add_output_metadata({"closed": closed, "stay_open": still_open})


@dg.op
def purge_rows(context: dg.OpExecutionContext, outbox: OutboxResource) -> None:
    """Removes old idempotency keys, and what tells of days that are long archived."""
    with one_line():
        from outbox_pipelines.partitions import purge

        purged = purge.purge(outbox.settings())
    context.add_output_metadata(dataclasses.asdict(purged))


@dg.job(
    description="""Makes the partitions of the days ahead (OUTBOX_PARTITIONS_AHEAD), closes the days that
are over, by the database's clock, and purges old idempotency keys (OUTBOX_KEYS_DAYS) and progress.

Use: its schedule runs it every hour. By hand after an outage of days, or when `outbox status` or the
check `partitions_ahead` says that there are few. Safe at any time, and by two at once; no writer waits.

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


def _verdict(ahead: int) -> dict[str, Any]:
    from outbox_pipelines.partitions.calendar import FEW_AHEAD

    return {
        "passed": ahead >= FEW_AHEAD,
        "severity": dg.AssetCheckSeverity.ERROR,
        "metadata": {"days_ahead": ahead},
        "description": f"{ahead} days ahead have a partition; {FEW_AHEAD} are the least",
    }
