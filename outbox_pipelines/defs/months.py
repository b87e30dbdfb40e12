"""The job and the schedule that make the coming months of an existing table."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
from typing import TYPE_CHECKING, Final

import dagster as dg

from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


def make_coming_months(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `make_coming_months`."""

    @dg.op(name=outbox.name_of("make_coming_months"))
    def make_coming_months(context: dg.OpExecutionContext) -> None:
        """Make the partitions of the current month and of OUTBOX_MONTHS_AHEAD after it, as far as missing."""
        with one_line(outbox):
            # Imported here so that definitions load without the drivers.
            from outbox_pipelines.existing.months.ahead import ensure

            done = ensure(outbox.load_settings())
        until = "" if done.until is None else done.until.isoformat()
        context.add_output_metadata({"table": done.table, "made": done.made, "newest_ends": until})

    return make_coming_months


_MAKE_MONTHS: Final = """\
Makes the monthly partitions of an existing table (OUTBOX_TABLE): the current month
and OUTBOX_MONTHS_AHEAD after it. Writers do not wait.

Use: its schedule runs it every six hours once OUTBOX_MONTHS_AHEAD is set. By hand: at any time.

When it fails: the run says in one line what to correct. Writers fail when the newest partition ends.
"""


def make_months(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `make_months`."""

    @outbox.job("make_months", _MAKE_MONTHS)
    def make_months() -> None:
        make_coming_months(outbox).alias("make_coming_months")()

    return make_months


_MAKE_MONTHS_SCHEDULE: Final = """\
Runs the job `make_months` four times a day. Leave it on. A skipped tick says what to correct in the settings.
"""


def make_months_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `make_months_schedule`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if kinds.of(settings).has_days or settings.months_ahead is None:
            return dg.SkipReason("no months to make: set OUTBOX_TABLE and OUTBOX_MONTHS_AHEAD")
        return dg.RunRequest()

    return ticks.schedule(outbox, "make_months", "make_months", "37 */6 * * *", _MAKE_MONTHS_SCHEDULE, one)
