"""Run requests of schedules for days: one run per day at a time, and a retry after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import dagster as dg

from outbox_pipelines.defs.ours import is_ours
from outbox_pipelines.defs.outbox import Outbox

NO_DAYS = "an existing table (OUTBOX_TABLE) has no days"
"""Why schedules of days skip."""
# Dagster adds this tag to every run of a partition.
DAY = "dagster/partition"
IN_FLIGHT = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def requests(
    context: dg.ScheduleEvaluationContext, outbox: Outbox, days: Sequence[date], *, nothing: str
) -> list[dg.RunRequest] | dg.SkipReason:
    """Return a run request for each of these days that has no unfinished run.

    Args:
        nothing: the skip reason if no day is given.
    """
    known = [day for day in days if outbox.days.has_partition_key(str(day))]
    if unknown := sorted(set(days) - set(known)):
        # Rows for days before the first one were written after the definitions were loaded.
        nothing = f"unknown days {', '.join(map(str, unknown))}: reload this code location"
        context.log.warning(nothing)
    if not known:
        return dg.SkipReason(nothing)
    free = [str(day) for day in known if not _at_work(context.instance, outbox, str(day))]
    if not free:
        return dg.SkipReason(f"runs in progress for {', '.join(map(str, known))}")
    at = f"{context.scheduled_execution_time:%Y-%m-%d %H:%M}"
    return [dg.RunRequest(partition_key=day, run_key=f"{day} at {at}") for day in free]


def _at_work(instance: dg.DagsterInstance, outbox: Outbox, day: str) -> bool:
    # The user's jobs may also have days.
    in_flight = dg.RunsFilter(statuses=IN_FLIGHT, tags={DAY: day})
    return any(is_ours(outbox, record.dagster_run) for record in instance.get_run_records(in_flight))
