"""The job and the schedule that remove archived events that are older than their retention."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import pages, ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


_EXPIRE_ARCHIVE: Final = """\
Removes archived events that are older than OUTBOX_ARCHIVE_RETENTION_DAYS has it for their aggregate type: the
file of a day is written again without them, and the former one is deleted. It cannot be undone. Only days
that are dropped from the table are touched. Also completes changes of days that were interrupted.

Use: its schedule runs it every night. By hand: `dry_run` only counts.

When it fails: the run names each day that stays, and why. Other days are done. Correct the cause, for example
a file that differs from its manifest, then run the job again.
"""
_EXPIRE_ARCHIVE_SCHEDULE: Final = """\
Runs the job `expire_archive` every night. While it does not run, events stay longer than their retention.
"""


class ExpireConfig(dg.Config):
    """What to remove."""

    dry_run: bool = Field(default=False, description="Count only; remove nothing")


def expire_archive(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `expire_archive`."""

    @outbox.op_job("expire_archive", _EXPIRE_ARCHIVE, pool=outbox.pool)
    def remove_expired_events(context: dg.OpExecutionContext, config: ExpireConfig) -> None:
        """Remove the expired events of each day, and report which days stay and why."""
        started = time.monotonic()
        with one_line(outbox):
            from outbox_pipelines.days.archive.expire import expire

            actor = f"Dagster run {context.run_id}"
            days = [*expire(outbox.load_settings(), actor=actor, dry_run=config.dry_run)]
        shown = [
            {
                "day": str(each.day),
                "removed": each.events,
                "of": each.rows,
                "aggregate types": plain(", ".join(each.types)),
                "stays because": plain(each.why_not),
            }
            for each in days
        ]
        metadata: dict[str, dg.MetadataValue] = {
            "days": pages.table(shown, "day", "removed", "of", "aggregate types", "stays because"),
            "removed": dg.MetadataValue.int(0 if config.dry_run else sum(each.events for each in days)),
            "seconds": dg.MetadataValue.float(round(time.monotonic() - started, 3)),
        }
        if failed := [each for each in days if each.why_not and not each.is_expected]:
            raise dg.Failure(
                plain(f"events of {failed[0].day} stay: {failed[0].why_not}"),
                metadata=metadata,
                allow_retries=False,
            )
        context.add_output_metadata(metadata)

    return remove_expired_events


def expire_archive_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `expire_archive`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if not settings.archives or not settings.archive_retention_days:
            return dg.SkipReason(
                "no retention configured: set OUTBOX_ARCHIVE and OUTBOX_ARCHIVE_RETENTION_DAYS"
            )
        return dg.RunRequest()

    return ticks.schedule(outbox, "expire_archive", "42 4 * * *", _EXPIRE_ARCHIVE_SCHEDULE, one, of_days=True)
