"""Runs for days, as schedules ask for them: one a day at a time, and again after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

import dagster as dg

# Dagster gives it to every run of a partition, whoever starts it.
_DAY = "dagster/partition"
_IN_FLIGHT = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def requests(
    context: dg.ScheduleEvaluationContext, days: Sequence[date], *, nothing: str
) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """A run for each of these days that none is at work on.

    Args:
        nothing: why there is none to ask for.
    """
    if not days:
        yield dg.SkipReason(nothing)
    for day in map(str, days):
        if _at_work(context.instance, day):
            yield dg.SkipReason(f"a run of {day} is at work")
        else:
            yield dg.RunRequest(
                partition_key=day, run_key=f"{day} at {context.scheduled_execution_time:%Y-%m-%d %H:%M}"
            )


def _at_work(instance: dg.DagsterInstance, day: str) -> bool:
    in_flight = dg.RunsFilter(statuses=_IN_FLIGHT, tags={_DAY: day})
    return bool(instance.get_run_records(in_flight, limit=1))
