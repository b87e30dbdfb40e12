"""Jobs and schedules of an existing table: remove published rows, make the coming months."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from typing import TYPE_CHECKING, Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


_CLEAN_TABLE: Final = """\
Removes rows of an existing table (OUTBOX_TABLE) that were published
OUTBOX_CLEAN_AFTER_HOURS ago, and drops monthly partitions that have only such rows. They are archived in
OUTBOX_ARCHIVE first, with a proof. Pending rows and dead letters stay.

Use: its schedule runs it every hour once OUTBOX_CLEAN_AFTER_HOURS is set. By hand: at any time; relay and
writers continue, and no lock is held for more than 50 ms.

When it fails: the run says in one line what to correct. Run it again; it continues from there.
"""
_CLEAN_TABLE_SCHEDULE: Final = """\
Runs the job `clean_table` every hour. Leave it on. A skipped tick says what to correct in the settings; rows
stay in the table until they are removed.
"""
_MAKE_MONTHS: Final = """\
Makes the monthly partitions of an existing table (OUTBOX_TABLE): the current month
and OUTBOX_MONTHS_AHEAD after it. Writers do not wait.

Use: its schedule runs it every six hours once OUTBOX_MONTHS_AHEAD is set. By hand: at any time.

When it fails: the run says in one line what to correct. Writers fail when the newest partition ends.
"""
_MAKE_MONTHS_SCHEDULE: Final = """\
Runs the job `make_months` four times a day. Leave it on. A skipped tick says what to correct in the settings.
"""


def clean_table(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `clean_table`."""

    @outbox.op_job("clean_table", _CLEAN_TABLE, pool=outbox.pool)
    def remove_published_rows(context: dg.OpExecutionContext) -> None:
        """Archive, prove and delete rows published long ago; drop months that have only such rows."""
        started = time.monotonic()
        with one_line(outbox):
            from outbox_pipelines.existing.cleaning.clean_up import clean

            cleaned = clean(outbox.load_settings())
        for note in cleaned.notes:
            context.log.warning(plain(note))
        context.add_output_metadata(
            {
                "table": cleaned.table,
                "rows_deleted": cleaned.deleted,
                "months_dropped": cleaned.dropped,
                "archive_files": cleaned.files,
                "notes": cleaned.notes,
                "longest_batch_ms": round(cleaned.longest * 1000, 1),
                "seconds": round(time.monotonic() - started, 3),
            }
        )

    return remove_published_rows


def clean_table_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `clean_table_schedule`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if kinds.of(settings).has_days or settings.clean_after_hours is None:
            return dg.SkipReason("no clean-up configured: set OUTBOX_TABLE and OUTBOX_CLEAN_AFTER_HOURS")
        return dg.RunRequest()

    # Not on the hour, when many other jobs start.
    return ticks.schedule(outbox, "clean_table", "22 * * * *", _CLEAN_TABLE_SCHEDULE, one)


def make_months(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `make_months`."""

    @outbox.op_job("make_months", _MAKE_MONTHS)
    def make_coming_months(context: dg.OpExecutionContext) -> None:
        """Make the partitions of the current month and of OUTBOX_MONTHS_AHEAD after it, as far as missing."""
        with one_line(outbox):
            from outbox_pipelines.existing.months import ensure

            done = ensure(outbox.load_settings())
        until = "" if done.until is None else done.until.isoformat()
        context.add_output_metadata({"table": done.table, "made": done.made, "newest_ends": until})

    return make_coming_months


def make_months_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `make_months_schedule`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if kinds.of(settings).has_days or settings.months_ahead is None:
            return dg.SkipReason("no months to make: set OUTBOX_TABLE and OUTBOX_MONTHS_AHEAD")
        return dg.RunRequest()

    return ticks.schedule(outbox, "make_months", "37 */6 * * *", _MAKE_MONTHS_SCHEDULE, one)
