"""Code locations of a Dagster instance: the one of a tick or a run, and others that have an outbox.

Invariants:
- The instance is shared: code that finds runs by a tag has the code location in the tag, or compares it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Final

import dagster as dg

# Tag of a run that relays; `dagster.yaml` limits the runs with one value.
SHARD: Final = "outbox/shard"

# In the metadata of a check's result.
OTHERS: Final = "other_outboxes"

# A sensor with only one of these names may be the user's.
_SENSORS: Final = {"relay_supervisor", "health"}
_ALIVE_SECONDS: Final = 120.0


def of_tick(context: dg.SensorEvaluationContext) -> str | None:
    """Return the name of the tick's code location; None if it is unknown, for example in a test."""
    return context.code_location_origin.location_name if context.code_location_origin else None


def of_run(run: dg.DagsterRun) -> str | None:
    """Return the name of a run's code location."""
    origin = run.remote_job_origin
    return origin.repository_origin.code_location_origin.location_name if origin else None


def is_here(context: dg.SensorEvaluationContext, run: dg.DagsterRun) -> bool:
    """Return whether a run is of the tick's code location: others may have another outbox."""
    here = of_tick(context)
    return here is None or of_run(run) == here


def shard_tag(place: str | None, shard: int) -> dict[str, str]:
    """Return the tag of a session: without the name, the shards of two outboxes would be counted as one."""
    return {SHARD: f"{place}:{shard}" if place else str(shard)}


def clash(context: dg.SensorEvaluationContext, now: float) -> str | None:
    """Return what is wrong if another code location of this instance has an outbox, otherwise None."""
    return _clash(context.instance, of_tick(context), now)


def mark(
    context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext | dg.SensorEvaluationContext,
) -> dict[str, str]:
    """Return metadata with the code location of a result, and whether another outbox has the same check."""
    here = of_tick(context) if isinstance(context, dg.SensorEvaluationContext) else of_run(context.run)
    wrong = _clash(context.instance, here, time.time())
    if wrong:
        context.log.warning(wrong)
    return ({"code_location": here} if here else {}) | ({OTHERS: wrong} if wrong else {})


def _clash(instance: dg.DagsterInstance, here: str | None, now: float) -> str | None:
    others = [name for name in _outboxes(instance, now) if name != here] if here else []
    if not others:
        return None
    return (
        f"code locations {', '.join(sorted([here or '', *others]))} of this Dagster instance each have an "
        "outbox, with equal keys of assets and checks: a result of one hides the other's. Events are still "
        "relayed. Give each outbox its own instance (DAGSTER_HOME and its storage)"
    )


def _outboxes(instance: dg.DagsterInstance, now: float) -> list[str]:
    """Return the code locations that have this package's sensors and whose sensors tick."""
    from outbox_pipelines.defs.dagster_internals import InstigatorType

    names: dict[str, set[str]] = defaultdict(set)
    last: dict[str, float] = defaultdict(float)
    for state in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR):
        if state.instigator_name in _SENSORS:
            place = state.origin.repository_origin.code_location_origin.location_name
            names[place].add(state.instigator_name)
            ticked = getattr(state.instigator_data, "last_tick_timestamp", None) or 0.0
            last[place] = max(last[place], ticked)
    return [place for place in names if names[place] == _SENSORS and now - last[place] < _ALIVE_SECONDS]
