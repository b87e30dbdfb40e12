"""The job and the schedule that maintain the partitions."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import dataclasses
from typing import TYPE_CHECKING, Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.runs import NO_DAYS
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings

# The table stays readable on a page of the UI.
_DAYS_SHOWN = 60


def make_partitions(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `make_partitions`."""

    @dg.op(name=outbox.name_of("make_partitions"))
    def make_partitions(context: dg.OpExecutionContext) -> None:
        """Create the missing partitions."""
        with one_line(outbox):
            from outbox_pipelines.days.partitions import ahead

            ensured = ahead.ensure(outbox.load_settings())
        context.log.info(f"created {ensured.made} partitions; {ensured.ahead} future days have a partition")
        context.add_output_metadata({"made": ensured.made, "days_ahead": ensured.ahead})

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
            from outbox_pipelines.days.partitions import purge

            purged = purge.purge(outbox.load_settings())
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


_MAINTAIN_PARTITIONS: Final = """\
Creates the partitions of future days (OUTBOX_PARTITIONS_AHEAD), closes past days (by the
database's clock), and purges old idempotency keys (OUTBOX_KEY_RETENTION_DAYS) and progress.

Use: its schedule runs it every hour. Run it by hand after an outage of days, or when `outbox status` or the
check `partitions_ahead` of `outbox/health` reports too few partitions. Safe at any time, also concurrently;
it blocks no writer.

A day that stays open is not a failure: the log and the metadata of `close_days` name the reason (a running
transaction, unpublished events) and what to do; the next run retries.

When it fails: the run says in one line what to correct. It is not urgent: inserts succeed until the last
future day with a partition is over, and days that are not closed stay in the table. The job needs the
database role that owns the outbox.
"""


def maintain_partitions(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `maintain_partitions`."""

    @outbox.job("maintain_partitions", _MAINTAIN_PARTITIONS)
    def maintain_partitions() -> None:
        # The steps are independent: partitions are created even if no day can be closed.
        make_partitions(outbox).alias("make_partitions")()
        close_days(outbox).alias("close_days")()
        purge_rows(outbox).alias("purge_rows")()
        show_days(outbox).alias("show_days")()

    return maintain_partitions


_MAINTAIN_PARTITIONS_SCHEDULE: Final = """\
Runs the job `maintain_partitions` every hour. Leave it on. When a run fails, writers are not affected for two
weeks; past days are not closed until then.
"""


def maintain_partitions_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `maintain_partitions_schedule`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        return dg.RunRequest() if kinds.of(settings).has_days else dg.SkipReason(NO_DAYS)

    # Not on the hour, when many other jobs start.
    name = "maintain_partitions"
    return ticks.schedule(outbox, name, name, "17 * * * *", _MAINTAIN_PARTITIONS_SCHEDULE, one)
