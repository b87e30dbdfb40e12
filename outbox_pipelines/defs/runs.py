"""Runs for days, as schedules ask for them: one a day at a time, and again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import dagster as dg

from outbox_pipelines.defs.events import DAYS
from outbox_pipelines.defs.ours import is_ours

# Dagster gives it to every run of a partition, whoever starts it.
_DAY = "dagster/partition"
IN_FLIGHT = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def requests(
    context: dg.ScheduleEvaluationContext, days: Sequence[date], *, nothing: str
) -> list[dg.RunRequest] | dg.SkipReason:
    """A run for each of these days that none is at work on.

    Args:
        nothing: why there is none to ask for.
    """
    known = [day for day in days if DAYS.has_partition_key(str(day))]
    if unknown := sorted(set(days) - set(known)):
        # Rows for days before the first one were written after the definitions were loaded.
        nothing = f"reload this code location: it does not know {', '.join(map(str, unknown))}"
        context.log.warning(nothing)
    if not known:
        return dg.SkipReason(nothing)
    free = [str(day) for day in known if not _at_work(context.instance, str(day))]
    if not free:
        return dg.SkipReason(f"runs are at work on {', '.join(map(str, known))}")
    at = f"{context.scheduled_execution_time:%Y-%m-%d %H:%M}"
    return [dg.RunRequest(partition_key=day, run_key=f"{day} at {at}") for day in free]


def _at_work(instance: dg.DagsterInstance, day: str) -> bool:
    # The user's jobs may have days as well. Another outbox's count: no schedule knows its code location.
    in_flight = dg.RunsFilter(statuses=IN_FLIGHT, tags={_DAY: day})
    return any(is_ours(run) for run in instance.get_runs(in_flight))
