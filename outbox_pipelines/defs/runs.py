"""Runs, assets and checks of an instance that belong to an outbox, and the runs of schedules for days.

Invariants:
- A job belongs to an outbox only if it has the tags: its name and its code location do not count.
- A run of selected assets belongs to an outbox only if every asset and check in it does.
- A day has one run at a time, and another one after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import lru_cache

import dagster as dg

from outbox_pipelines.defs.attributes import ARCHIVE_CHECKS
from outbox_pipelines.defs.outbox import NAME, PACKAGE, Outbox
from outbox_pipelines.quality.expectations.day_suite import OWN
from outbox_pipelines.quality.rules import OF_CONNECTOR, RULES

_ASSETS = (
    *("events", "relay", "health", "connector", "inbox", "archive", "dropped", "replays"),
    "reconciliation",
)
_CHECKS = {
    "events": ("event_types_documented",),
    "health": (*(rule.name for rule in RULES if rule.name not in OF_CONNECTOR), "database", "last_hour"),
    "connector": tuple(OF_CONNECTOR),
    "inbox": ("handled",),
    "archive": ARCHIVE_CHECKS,
    "reconciliation": ("nothing_is_lost",),
}


@lru_cache
def assets(outbox: Outbox) -> frozenset[dg.AssetKey]:
    """Return the keys of the outbox's assets, except its topics."""
    return frozenset(outbox.key(name) for name in _ASSETS)


@lru_cache
def checks(outbox: Outbox) -> frozenset[dg.AssetCheckKey]:
    """Return the keys of the outbox's checks."""
    return frozenset(
        dg.AssetCheckKey(outbox.key(asset), name)
        for asset, names in _CHECKS.items()
        for name in names
        if name != OWN or outbox.is_set("expectations")
    )


def is_of_package(run: dg.DagsterRun) -> bool:
    """Return whether the run is of a job of this package, of any outbox."""
    return PACKAGE.items() <= run.tags.items()


def is_ours(outbox: Outbox, run: dg.DagsterRun) -> bool:
    """Return whether the run is of a job of the outbox, or of assets and checks of the outbox only."""
    if is_of_package(run):
        return run.tags.get(NAME) == outbox.name
    # The name of Dagster's own job for assets selected on a page; a user's job may also select our assets.
    if not run.job_name.startswith("__"):
        return False
    selected, checked = run.asset_selection or set(), run.asset_check_selection or set()
    return bool(selected or checked) and selected <= assets(outbox) and checked <= checks(outbox)


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
