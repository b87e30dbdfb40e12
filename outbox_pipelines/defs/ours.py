"""Runs, assets and checks of an instance that belong to this package; all others are the user's.

Invariants:
- A job is ours only if it has the tag: its name and its code location do not count.
- A run of selected assets is ours only if every asset and check in it is.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from outbox_pipelines.quality.rules import RULES

# Every job has this tag, and Dagster copies it to the job's runs.
TAGS: Final = {"outbox/package": "outbox_pipelines"}

# A process for each step doubles the CPU time of a run and speeds up no job here. It is set for each job
# because the executor of a `Definitions` also applies to the user's jobs.
EXECUTOR: Final = dg.in_process_executor

ASSETS: Final = frozenset(
    dg.AssetKey(["outbox", name])
    for name in ("events", "relay", "health", "inbox", "archive", "dropped", "reconciliation")
)
CHECKS: Final = frozenset(
    dg.AssetCheckKey(dg.AssetKey(["outbox", asset]), name)
    for asset, names in {
        "events": ("events_as_expected", "event_types_documented"),
        "health": (*(rule.name for rule in RULES), "database"),
        "inbox": ("handled",),
        "archive": ("archive_equals_table",),
        "reconciliation": ("nothing_is_lost",),
    }.items()
    for name in names
)


def is_ours(run: dg.DagsterRun) -> bool:
    """Return whether the run is of a job of this package, or of assets and checks of this package only."""
    if TAGS.items() <= run.tags.items():
        return True
    # The name of Dagster's own job for assets selected on a page; a user's job may also select our assets.
    if not run.job_name.startswith("__"):
        return False
    assets, checks = run.asset_selection or set(), run.asset_check_selection or set()
    return bool(assets or checks) and assets <= ASSETS and checks <= CHECKS
