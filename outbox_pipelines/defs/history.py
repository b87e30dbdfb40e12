"""The job and the schedule that remove Dagster's history of old runs."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

from outbox_pipelines.defs import history_storage, ours
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.errors import SetupError

# Dagster stores this tag with every run that its web server or daemon starts: the run's code location.
LOCATION = ".dagster/repository"
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_LOG_EVERY = 100


def delete_old_history(outbox: Outbox) -> dg.OpDefinition:
    """Return the op `delete_old_history`."""

    @dg.op(name=outbox.name_of("delete_old_history"))
    def delete_old_history(context: dg.OpExecutionContext) -> None:
        """Delete runs that ended long ago, then events that have no run."""
        # Imported here so that definitions load fast.
        from sqlalchemy.exc import SQLAlchemyError

        started = time.monotonic()
        try:
            days = outbox.load_settings().run_retention_days
            before = datetime.now(UTC) - timedelta(days=days)
            context.log.info(f"removing runs that ended before {before:%Y-%m-%d %H:%M} UTC ({days} days)")
            runs, kept = _delete_runs(context, outbox, before)
            events = history_storage.delete_events(
                context.instance,
                before,
                outbox,
                lambda deleted: context.log.info(f"{deleted:,} events without a run"),
            )
        except SetupError as error:
            raise dg.Failure(str(error), allow_retries=False) from None
        except (SQLAlchemyError, OSError) as error:
            raise dg.Failure(
                f"Dagster's storage failed: {str(error).splitlines()[0]}: correct the cause, or wait until "
                "it is less busy, and run purge_history again; it continues from here"
            ) from None
        context.add_output_metadata(
            {
                "runs": runs,
                "runs_kept_for_what_they_show": kept,
                "events": events,
                "seconds": round(time.monotonic() - started, 3),
            }
        )

    return delete_old_history


def _delete_runs(context: dg.OpExecutionContext, outbox: Outbox, before: datetime) -> tuple[int, int]:
    """Return how many runs were deleted, and how many stay because a page shows their events."""
    location = context.run.tags_for_storage().get(LOCATION)
    if location is None:
        raise SetupError(
            "this run was not started by Dagster's web server or daemon, so its code location is unknown: "
            "launch purge_history there"
        )
    # A code location may also have the user's jobs.
    old = [
        run.run_id
        for run in context.instance.get_runs(
            dg.RunsFilter(statuses=_ENDED, updated_before=before, tags={LOCATION: location})
        )
        if ours.is_ours(outbox, run)
    ]
    in_view = history_storage.runs_in_view(context.instance)
    to_go = [run_id for run_id in old if run_id not in in_view]
    for done, run_id in enumerate(to_go, 1):
        history_storage.delete_run(context.instance, run_id)
        if done % _LOG_EVERY == 0 or done == len(to_go):
            context.log.info(f"{done:,} of {len(to_go):,} runs")
    return len(to_go), len(old) - len(to_go)


_PURGE_HISTORY: Final = """\
Removes Dagster's history of runs that ended more than OUTBOX_RUN_RETENTION_DAYS ago
(14): the runs of this package's jobs in this code location with their events and logs, and old results and
observations of its assets without a run. Your own jobs, assets and checks keep their history. Dagster itself
never removes history; a busy outbox adds about 60 MB a day in SQLite.

The newest entries that a page shows stay, however old: each day's materialization and result, each check's
last evaluation, each asset's last observation. Unfinished runs stay. Dagster itself removes ticks: see
`retention` in dagster.yaml. The outbox itself, its events and its archives are not changed.

Use: its schedule runs it every night. Run it by hand after you lower OUTBOX_RUN_RETENTION_DAYS. Safe at any
time.

When it fails: the run says in one line what to correct. Deleted history stays deleted; run the job again.
"""


def purge_history(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `purge_history`."""

    @outbox.job("purge_history", _PURGE_HISTORY)
    def purge_history() -> None:
        delete_old_history(outbox).alias("delete_old_history")()

    return purge_history


_PURGE_HISTORY_SCHEDULE: Final = """\
Runs the job `purge_history` every night at 03:07 UTC.

Use: leave it on, or Dagster's storage grows without limit. Turn it off if another tool prunes this instance.

When a run fails: see the job. A few missed nights only cost disk space.
"""


def purge_history_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `purge_history_schedule`."""

    return dg.ScheduleDefinition(
        name=outbox.name_of("purge_history"),
        job_name=outbox.name_of("purge_history"),
        # Not on the hour, when many other jobs start, and not together with the hourly ones.
        cron_schedule=outbox.cron("purge_history", "7 3 * * *"),
        execution_timezone="UTC",
        default_status=outbox.schedule_status,
        description=outbox.text(_PURGE_HISTORY_SCHEDULE),
    )
