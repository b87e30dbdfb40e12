"""The job and the schedule that remove Dagster's history of old runs."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

from outbox_pipelines.core.text import counted
from outbox_pipelines.defs import runs
from outbox_pipelines.defs.jobs import op_job
from outbox_pipelines.defs.outbox import NAME, PACKAGE, Outbox
from outbox_pipelines.defs.runs import DAY
from outbox_pipelines.errors import SetupError

# Jobs whose runs recur all day, report no day and have no check. All other runs stay: a page about a day
# uses the events of its run.
JOBS: Final = (
    "relay_session",
    "relay_once",
    "maintain_partitions",
    "clean_table",
    "make_months",
    "drain_inbox",
    "expire_archive",
    "register_days",
    "sweep_bodies",
    "purge_history",
)
_ENDED: Final = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
# Runs that are read at once: more than those that stay, two for each job, asset and topic.
_BATCH: Final = 1_000
_LOG_EVERY: Final = 100


def purge_history(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `purge_history`."""

    @op_job(outbox, "purge_history", _PURGE_HISTORY)
    def delete_old_history(context: dg.OpExecutionContext) -> None:
        """Delete runs that ended long ago."""
        started = time.monotonic()
        deleted = 0
        try:
            days = outbox.load_settings().run_retention_days
            before = datetime.now(UTC) - timedelta(days=days)
            context.log.info(f"removing runs that ended before {before:%Y-%m-%d %H:%M} UTC ({days} days)")
            for deleted in _delete_runs(context, outbox, before):
                if deleted % _LOG_EVERY == 0:
                    context.log.info(f"{counted(deleted, 'run')} deleted")
        except SetupError as error:
            raise dg.Failure(outbox.by_its_variables(str(error)), allow_retries=False) from None
        except Exception as error:  # noqa: BLE001 - whatever its storage raises
            raise dg.Failure(
                f"Dagster's storage failed: {str(error).splitlines()[0]}: correct the cause, or wait until "
                "it is less busy, and run purge_history again; it continues from here"
            ) from None
        context.add_output_metadata({"runs": deleted, "seconds": round(time.monotonic() - started, 3)})

    return delete_old_history


def _delete_runs(context: dg.OpExecutionContext, outbox: Outbox, before: datetime) -> Iterator[int]:
    """Delete runs, and yield after each how many are deleted."""
    from outbox_pipelines.defs.dagster_internals import LOCATION, delete_run, location_of

    location = location_of(context.run)
    if location is None:
        raise SetupError(
            "this run was not started by Dagster's web server or daemon, so its code location is unknown: "
            "launch purge_history there"
        )
    instance, deleted = context.instance, 0
    tags = {**PACKAGE, NAME: outbox.name, LOCATION: location}
    shown = _runs_in_view(instance, outbox)
    for job in map(outbox.name_of, JOBS):
        newest = instance.get_run_records(dg.RunsFilter(job_name=job, tags=tags, statuses=_ENDED), limit=1)
        kept = shown | {record.dagster_run.run_id for record in newest}
        old = dg.RunsFilter(job_name=job, tags=tags, statuses=_ENDED, updated_before=before)
        while to_go := [
            record.dagster_run.run_id
            for record in instance.get_run_records(old, limit=_BATCH, ascending=True)
            if record.dagster_run.run_id not in kept and DAY not in record.dagster_run.tags
        ]:
            for run_id in to_go:
                delete_run(instance, run_id)
                deleted += 1
                yield deleted


def _runs_in_view(instance: dg.DagsterInstance, outbox: Outbox) -> set[str]:
    """Return the runs with the newest materialization and observation of each asset, and of each topic."""
    topics = instance.get_asset_keys(prefix=list(outbox.outer_key("topic").path))
    records = [
        record
        for key in (*runs.assets(outbox), *topics)
        for fetch in (instance.fetch_materializations, instance.fetch_observations)
        for record in fetch(key, limit=1).records
    ]
    return {record.run_id for record in records}


_PURGE_HISTORY: Final = """\
Removes Dagster's history of runs that ended more than OUTBOX_RUN_RETENTION_DAYS ago (14), of the jobs that
recur all day: relay sessions, `maintain_partitions`, `clean_table`, `make_months`, `drain_inbox` and this
one, in this code location. Dagster itself never removes runs; a busy outbox adds about 35 MB a day in SQLite.

The newest run of each job stays, and so do the runs with the newest entry that a page shows for an asset or a
topic. All runs of days stay (archive, drop, reconcile), and your own. The outbox itself, its events and its
archives are not changed. Dagster itself removes ticks: see `retention` in dagster.yaml.

Use: its schedule runs it every night. Run it by hand after you lower OUTBOX_RUN_RETENTION_DAYS. Safe at any
time.

When it fails: the run says in one line what to correct. Deleted history stays deleted; run the job again.
"""


_PURGE_HISTORY_SCHEDULE: Final = """\
Runs the job `purge_history` every night. Leave it on, or Dagster's storage grows without limit. Turn it off
if another tool prunes this instance. A few missed nights only cost disk space.
"""


def purge_history_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `purge_history_schedule`."""
    # Not on the hour, when many other jobs start, and not together with the hourly ones.
    return dg.ScheduleDefinition(**outbox.timing("purge_history", "7 3 * * *", _PURGE_HISTORY_SCHEDULE))
