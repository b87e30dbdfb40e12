"""The job and the schedule that remove published rows of an existing table."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time

import dagster as dg

from outbox_pipelines.defs import ours
from outbox_pipelines.defs.failures import one_line
from outbox_pipelines.defs.resources import OutboxResource


@dg.op
def remove_published_rows(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Archive, prove and delete rows that were published long ago; drop months that have only such rows."""
    started = time.monotonic()
    with one_line():
        # Imported here so that definitions load without the drivers.
        from outbox_pipelines.cleaning.clean import clean

        cleaned = clean(outbox_pipelines.settings())
    for note in cleaned.notes:
        context.log.warning(note)
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


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Removes rows of an existing table (OUTBOX_TABLE_FILE) that were published
OUTBOX_CLEAN_AFTER_HOURS ago, and drops monthly partitions that have only such rows. They are archived in
OUTBOX_ARCHIVE first, with a proof. Pending rows and dead letters stay.

Use: its schedule runs it every hour once OUTBOX_CLEAN_AFTER_HOURS is set. By hand: at any time; relay and
writers continue, and no lock is held for more than 50 ms.

When it fails: the run says in one line what to correct. Run it again; it continues from there.
""",
)
def clean_table() -> None:
    remove_published_rows()


@dg.schedule(
    name="clean_table",
    job=clean_table,
    # Not on the hour, when many other jobs start.
    cron_schedule="22 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="""Runs the job `clean_table` every hour, if OUTBOX_TABLE_FILE and OUTBOX_CLEAN_AFTER_HOURS
are set.

Use: leave it on; without these settings it skips.

When a tick fails: its error says in one line what to correct in the settings. No event is lost: rows stay in
the table until they are removed.
""",
)
def clean_table_schedule(outbox_pipelines: OutboxResource) -> dg.RunRequest | dg.SkipReason:
    """Return the run to launch. A `SetupError` fails the tick, as in `relay_supervisor`."""
    settings = outbox_pipelines.settings()
    if settings.table_file is None or settings.clean_after_hours is None:
        return dg.SkipReason("no clean-up configured: set OUTBOX_TABLE_FILE and OUTBOX_CLEAN_AFTER_HOURS")
    return dg.RunRequest()
