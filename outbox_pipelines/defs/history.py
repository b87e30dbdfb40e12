"""The job and the schedule that remove what Dagster remembers of runs that are long over."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time
from datetime import UTC, datetime, timedelta

import dagster as dg

from outbox_pipelines.defs import history_storage, ours
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.errors import SetupError

# Dagster stores it with every run that its web server or its daemon starts: which code location it is of.
LOCATION = ".dagster/repository"
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_LOG_EVERY = 100


@dg.op
def delete_old_history(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    """Deletes runs that ended long ago, then events that have no run."""
    # Here, because definitions are to load fast.
    from sqlalchemy.exc import SQLAlchemyError

    started = time.monotonic()
    try:
        days = outbox_pipelines.settings().run_retention_days
        before = datetime.now(UTC) - timedelta(days=days)
        context.log.info(f"removing what ended before {before:%Y-%m-%d %H:%M} UTC ({days} days)")
        runs, kept = _delete_runs(context, before)
        events = history_storage.delete_events(
            context.instance, before, lambda deleted: context.log.info(f"{deleted:,} events without a run")
        )
    except SetupError as error:
        raise dg.Failure(str(error), allow_retries=False) from None
    except (SQLAlchemyError, OSError) as error:
        raise dg.Failure(
            f"Dagster's storage refuses: {str(error).splitlines()[0]}: mend it, or wait until it is less "
            "busy, and run purge_history again; it goes on from here"
        ) from None
    context.add_output_metadata(
        {
            "runs": runs,
            "runs_kept_for_what_they_show": kept,
            "events": events,
            "seconds": round(time.monotonic() - started, 3),
        }
    )


def _delete_runs(context: dg.OpExecutionContext, before: datetime) -> tuple[int, int]:
    """How many were deleted, and how many stay because a page shows what they say."""
    location = context.run.tags_for_storage().get(LOCATION)
    if location is None:
        raise SetupError(
            "this run was not started by Dagster's web server or daemon, so that nothing says whose runs are "
            "to be removed: launch purge_history there"
        )
    # A code location may have jobs of the user's as well.
    old = [
        run.run_id
        for run in context.instance.get_runs(
            dg.RunsFilter(statuses=_ENDED, updated_before=before, tags={LOCATION: location})
        )
        if ours.is_ours(run)
    ]
    in_view = history_storage.runs_in_view(context.instance)
    to_go = [run_id for run_id in old if run_id not in in_view]
    for done, run_id in enumerate(to_go, 1):
        history_storage.delete_run(context.instance, run_id)
        if done % _LOG_EVERY == 0 or done == len(to_go):
            context.log.info(f"{done:,} of {len(to_go):,} runs")
    return len(to_go), len(old) - len(to_go)


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Removes what Dagster remembers of runs that ended more than OUTBOX_RUN_RETENTION_DAYS ago
(14): the runs of this package's jobs in this code location with their events and logs, and old verdicts and
observations of its assets without a run. Your own jobs, assets and checks keep their history. Dagster itself
never removes any; a busy outbox adds some 60 MB a day in SQLite.

What a page shows as the newest stays, however old: each day's materialization and verdict, each check's last
evaluation, each asset's last observation. Runs in flight stay. Ticks are Dagster's own to remove: see
`retention` in dagster.yaml. Nothing of the outbox itself is touched, neither events nor archives.

Use: its schedule runs it every night. By hand after OUTBOX_RUN_RETENTION_DAYS was lowered. Safe at any time.

When it fails: the run says in one line what to mend. What was removed stays removed; run it again.
""",
)
def purge_history() -> None:
    delete_old_history()


purge_history_schedule = dg.ScheduleDefinition(
    name="purge_history",
    job=purge_history,
    # Off the full hour, when everybody's jobs start; and apart from the hourly ones.
    cron_schedule="7 3 * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="""Runs the job `purge_history` every night at 03:07 UTC.

Use: leave it on, or Dagster's storage grows without end. Turn it off where something else prunes this
instance.

When a run fails: see the job. A few nights missed cost disk space and nothing else.
""",
)
