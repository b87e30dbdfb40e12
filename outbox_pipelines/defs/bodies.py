"""The job and the schedule that remove bodies of large payloads to which no event refers."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from datetime import date
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, plain, size
from outbox_pipelines.defs import pages, ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings


_SWEEP_BODIES: Final = """\
Removes the bodies of large payloads in OUTBOX_BODIES to which no event refers: those of transactions that
were rolled back. A body to which an event refers is never removed, wherever the event is.

Use: its schedule runs it every night for the last seven days. By hand: `since` names an earlier first day,
`dry_run` only counts. Safe at any time.

When it fails: the run says in one line which days stay and why. Nothing is lost: only the bodies that could
be removed take space. Correct the cause, then run the job again, with `since` if more than a week has passed.
"""
_SWEEP_BODIES_SCHEDULE: Final = """\
Runs the job `sweep_bodies` every night. Leave it on. While it does not run, the bodies of rolled-back
transactions stay.
"""


class SweepConfig(dg.Config):
    """What to sweep."""

    since: str = Field(default="", description="The first day, as 2026-11-21; empty: seven days before today")
    dry_run: bool = Field(default=False, description="Count only; remove nothing")


def sweep_bodies(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `sweep_bodies`."""

    @outbox.op_job("sweep_bodies", _SWEEP_BODIES, pool=outbox.pool)
    def remove_unreferenced_bodies(context: dg.OpExecutionContext, config: SweepConfig) -> None:
        """Remove the bodies of each day to which no event refers, and report why those of others stay."""
        started = time.monotonic()
        since = _day(config.since)
        with one_line(outbox):
            from outbox_pipelines.days.bodies.sweep import sweep

            days = [*sweep(outbox.load_settings(), since, dry_run=config.dry_run)]
        refused = [each for each in days if each.why_not and not each.is_expected]
        for each in days:
            if each.why_not:
                log = context.log.info if each.is_expected else context.log.error
                log(plain(f"{each.day}: {counted(each.objects, 'body', 'bodies')} stay: {each.why_not}"))
        shown = [
            {
                "day": str(each.day),
                "bodies": each.objects,
                "unreferenced": each.unreferenced,
                "size": size(each.size),
                "stay because": each.why_not,
            }
            for each in days
        ]
        metadata: dict[str, dg.MetadataValue] = {
            "days": pages.table(shown, "day", "bodies", "unreferenced", "size", "stay because"),
            "removed": dg.MetadataValue.int(0 if config.dry_run else sum(each.unreferenced for each in days)),
            "seconds": dg.MetadataValue.float(round(time.monotonic() - started, 3)),
        }
        if refused:
            more = f" (and {counted(len(refused) - 1, 'more day')})" if len(refused) > 1 else ""
            raise dg.Failure(
                plain(f"bodies of {refused[0].day} stay{more}: {refused[0].why_not}"),
                metadata=metadata,
                allow_retries=False,
            )
        context.add_output_metadata(metadata)

    return remove_unreferenced_bodies


def sweep_bodies_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `sweep_bodies`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if not settings.bodies:
            return dg.SkipReason("no store of large payloads configured: set OUTBOX_BODIES to sweep it")
        return dg.RunRequest()

    return ticks.schedule(outbox, "sweep_bodies", "12 4 * * *", _SWEEP_BODIES_SCHEDULE, one, of_days=True)


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise dg.Failure(
            plain(f"since is {text!r}: write a date such as 2026-11-21"), allow_retries=False
        ) from None
