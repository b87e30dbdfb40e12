"""Jobs and schedules of upkeep: rows and months of a table, expired events, bodies, the Iceberg table."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from datetime import date
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, plain, size
from outbox_pipelines.defs import pages, ticks
from outbox_pipelines.defs.jobs import op_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line
from outbox_pipelines.errors import NotReadyError
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

    @op_job(outbox, "clean_table", _CLEAN_TABLE, pool=outbox.pool)
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

    @op_job(outbox, "make_months", _MAKE_MONTHS)
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

    @op_job(outbox, "expire_archive", _EXPIRE_ARCHIVE, pool=outbox.pool)
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

    @op_job(outbox, "register_days", _REGISTER_DAYS)
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

    @op_job(outbox, "sweep_bodies", _SWEEP_BODIES, pool=outbox.pool)
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
