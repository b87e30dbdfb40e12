"""Which runs, assets and checks of an instance are this package's; the rest is the user's and is left alone.

Invariants:
- A job has the tag, or it is not ours: its name and its code location do not count.
- A run of chosen assets is ours only if every asset and check in it is.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from outbox_pipelines.quality.rules import RULES

# Every job has it, and Dagster gives it to the job's runs.
TAGS: Final = {"outbox/package": "outbox_pipelines"}

# A process for each step costs twice the CPU of a run, and no job here gains by it. Set for each job: the
# executor of a `Definitions` applies to the user's jobs, too.
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
    """Whether a job of this package was run, or assets and checks of this package alone."""
    if TAGS.items() <= run.tags.items():
        return True
    # Dagster's own job for assets that were chosen on a page; a user's job may choose ours too.
    if not run.job_name.startswith("__"):
        return False
    assets, checks = run.asset_selection or set(), run.asset_check_selection or set()
    return bool(assets or checks) and assets <= ASSETS and checks <= CHECKS
