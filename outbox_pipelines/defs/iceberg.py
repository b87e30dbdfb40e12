"""The job and the schedule that register archived days in the Iceberg table."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from typing import TYPE_CHECKING, Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import pages, ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line
from outbox_pipelines.errors import NotReadyError

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


_REGISTER_DAYS: Final = """\
Registers archived days in the Iceberg table of OUTBOX_ICEBERG: those that it lacks, and those that were
archived again. No file is written or moved. Neither archiving nor dropping a day waits for it.

Use: its schedule runs it every hour. Safe at any time, also by hand.

When it fails: the catalog does not answer, or the run names each day that another engine has changed, or
whose file is missing. Other days are registered. `outbox archive register --again`, on a command line,
replaces the table by a new one; the archive stays as it is.
"""
_REGISTER_DAYS_SCHEDULE: Final = """\
Runs the job `register_days` every hour, after `archive_days`. Leave it on. While it does not run, readers of
the Iceberg table miss the newest days; nothing is lost.
"""


def register_days(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `register_days`."""

    @outbox.op_job("register_days", _REGISTER_DAYS)
    def register_archived_days(context: dg.OpExecutionContext) -> None:
        """Register what the Iceberg table lacks, and report what another engine has changed."""
        started = time.monotonic()
        with one_line(outbox):
            from outbox_pipelines.days import iceberg

            try:
                done = iceberg.register(outbox.load_settings())
            except NotReadyError as error:
                # The next hour's run has the same work.
                context.log.info(plain(str(error)))
                return
        metadata: dict[str, dg.MetadataValue] = {
            "table": dg.MetadataValue.text(done.table),
            "added": dg.MetadataValue.text(", ".join(map(str, done.added))),
            "replaced": dg.MetadataValue.text(", ".join(map(str, done.replaced))),
            "unchanged": dg.MetadataValue.int(done.unchanged),
            "differences": pages.report(done.differences),
            "seconds": dg.MetadataValue.float(round(time.monotonic() - started, 3)),
        }
        if done.differences:
            for difference in done.differences:
                context.log.error(plain(difference))
            raise dg.Failure(plain(done.differences[0]), metadata=metadata, allow_retries=False)
        context.add_output_metadata(metadata)

    return register_archived_days


def register_days_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `register_days`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if not settings.archives or not settings.iceberg:
            return dg.SkipReason("no Iceberg catalog configured: set OUTBOX_ARCHIVE and OUTBOX_ICEBERG")
        return dg.RunRequest()

    return ticks.schedule(outbox, "register_days", "52 * * * *", _REGISTER_DAYS_SCHEDULE, one, of_days=True)
