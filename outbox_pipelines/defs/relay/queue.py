"""Whether Dagster's queue of runs has places for the sessions and for all other runs."""

from __future__ import annotations

import dagster as dg


def too_few(instance: dg.DagsterInstance, shards: int) -> str | None:
    """What is wrong if sessions alone take every place of the instance; else None."""
    queue = instance.get_concurrency_config().run_queue_config
    allowed = queue.max_concurrent_runs if queue else -1
    # One more than sessions: successors and all other jobs take turns in it.
    needed = shards + 1
    if allowed is None or allowed < 0 or allowed >= needed:
        return None
    return (
        f"max_concurrent_runs is {allowed} in dagster.yaml; with {shards} shards set at least {needed}: "
        "until then sessions take every place, no successor starts, and no other run does"
    )
