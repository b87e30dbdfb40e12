"""Code locations of a Dagster instance: the one of a tick or a run, and others that have an outbox.

Invariants:
- The instance is shared: code that finds runs by a tag has the code location in the tag, or compares it.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs.outbox import ONLY, Outbox

# Tag of a run that relays; `dagster.yaml` limits the runs with one value.
SHARD: Final = "outbox/shard"

# In the metadata of a check's result.
OTHERS: Final = "other_outboxes"

_SENSORS: Final = ("relay_supervisor", "health")
SHARED_HEALTH: Final = "outboxes_health"
"""The sensor `health` of several outboxes."""
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


def shard_tag(place: str | None, outbox: Outbox, shard: int) -> dict[str, str]:
    """Return the tag of a session: without the names, the shards of two outboxes would be counted as one."""
    name = None if outbox.name == ONLY else outbox.name
    return {SHARD: ":".join(filter(None, [place, name, str(shard)]))}


def clash(context: dg.SensorEvaluationContext, outbox: Outbox, now: float) -> str | None:
    """Return what is wrong if another code location of this instance has the same outbox, otherwise None."""
    return _clash(context.instance, outbox, of_tick(context), now)


def mark(
    context: dg.AssetExecutionContext
    | dg.AssetCheckExecutionContext
    | dg.OpExecutionContext
    | dg.SensorEvaluationContext,
    outbox: Outbox,
) -> dict[str, str]:
    """Return metadata with the code location of a result, and whether another outbox has the same check."""
    here = of_tick(context) if isinstance(context, dg.SensorEvaluationContext) else of_run(context.run)
    wrong = _clash(context.instance, outbox, here, time.time())
    if wrong:
        context.log.warning(plain(wrong))
    return ({"code_location": here} if here else {}) | ({OTHERS: wrong} if wrong else {})


def _clash(instance: dg.DagsterInstance, outbox: Outbox, here: str | None, now: float) -> str | None:
    others = [name for name in _locations(instance, outbox, now) if name != here] if here else []
    if not others:
        return None
    return (
        f"code locations {', '.join(sorted([here or '', *others]))} of this Dagster instance each have an "
        f"outbox named {outbox.name}, with equal keys of assets and checks: a result of one hides the "
        "other's. Events are still relayed. Rename one (OUTBOX_NAME), or give each its own instance "
        "(DAGSTER_HOME and its storage)"
    )


def _locations(instance: dg.DagsterInstance, outbox: Outbox, now: float) -> list[str]:
    """Return the code locations that have sensors of an outbox of this name, and whose sensors tick."""
    from outbox_pipelines.defs.dagster_internals import sensor_states

    wanted = {outbox.name_of(name) for name in _SENSORS}
    found: dict[str, set[str]] = defaultdict(set)
    last: dict[str, float] = defaultdict(float)
    for state in sensor_states(instance):
        name, data = state.instigator_name, state.instigator_data
        is_shared = name == SHARED_HEALTH and outbox.name in _outboxes_of(getattr(data, "cursor", None))
        if name in wanted or is_shared:
            place = state.origin.repository_origin.code_location_origin.location_name
            found[place] |= wanted if is_shared else {name}
            last[place] = max(last[place], getattr(data, "last_tick_timestamp", None) or 0.0)
    # A sensor with only one of the names without a prefix may be the user's.
    enough = len(_SENSORS) if outbox.name == ONLY else 1
    return [place for place in found if len(found[place]) >= enough and now - last[place] < _ALIVE_SECONDS]


def _outboxes_of(cursor: str | None) -> set[str]:
    """Return the outboxes of a shared sensor: its cursor has an entry for each."""
    try:
        return set(json.loads(cursor or "{}")["cursors"])
    except (ValueError, TypeError, KeyError):
        return set()
