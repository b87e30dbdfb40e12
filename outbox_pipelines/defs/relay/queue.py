"""The slots of Dagster's run queue: whether there are enough, and how sessions and other runs take turns.

Invariants:
- A session ends early only if nothing else can free a slot: sessions have all of them, and the daemon that
  starts queued runs is alive. Of several sessions, one ends.
- Its successor is then queued behind the waiting runs. As soon as one of those has started, the successor is
  first again: no run waits for more than one turn of each session, no shard for more than one run of each
  free slot.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from outbox_pipelines.defs import places, runs
from outbox_pipelines.defs.outbox import NAME, Outbox

_KEY: Final = "dagster/priority"
_HIGHEST: Final = 10
# First in the queue: the other runs depend on events.
PRIORITY: Final = {_KEY: str(_HIGHEST)}

SESSION: Final = {"outbox/job": "relay_session"}
"""Tag of the job that relays, of any outbox."""
# How long, at most, a session waits for its successor after its time is over: while other runs are queued,
# and while none is. A session that ends without a successor leaves the shard without a relay for seconds.
_PATIENCE: Final = 30.0
_PATIENCE_ALONE: Final = 3600.0
# How long a session takes to hand over after its time, until its successor has started as a pod.
_HAND_OVER_SECONDS: Final = 120.0
_IN_PROGRESS: Final = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_QUEUED: Final = [dg.DagsterRunStatus.QUEUED]
# A backfill queues thousands of runs; the oldest are sufficient.
_LOOK_AT: Final = 100
_DAEMON: Final = "QUEUED_RUN_COORDINATOR"
# The daemon sends a heartbeat every 30 s.
_DAEMON_SECONDS: Final = 120.0


def troubles(
    instance: dg.DagsterInstance, tags: Mapping[str, str], *, shards: int, others: int, session_seconds: float
) -> list[str]:
    """Return what in `dagster.yaml` keeps sessions from handing over to their successors.

    Args:
        tags: of a session.
        shards: of the outbox.
        others: shards of other outboxes that have a session.
    """
    found = [_too_few(instance, shards + others), _too_short(instance, session_seconds)]
    return [*filter(None, found), *_limited(instance, tags, shards)]


def _too_few(instance: dg.DagsterInstance, shards: int) -> str | None:
    slots = _slots(instance)
    # One more than sessions: successors and all other jobs take turns in that slot.
    needed = shards + 1
    if slots is None or slots >= needed:
        return None
    return (
        f"max_concurrent_runs is {slots} in dagster.yaml; with {shards} shards set at least {needed}. Until "
        "then a session ends before its successor starts whenever another run is queued, and the events of "
        "its shard are not published while that run takes the slot"
    )


def _too_short(instance: dg.DagsterInstance, session_seconds: float) -> str | None:
    from outbox_pipelines.defs.dagster_internals import longest_run

    most = longest_run(instance)
    needed = math.ceil(session_seconds + _HAND_OVER_SECONDS)
    if not 0 < most < needed:
        return None
    return (
        f"run_monitoring.max_runtime_seconds is {most} in dagster.yaml: Dagster ends relay sessions before "
        f"they hand over, after {session_seconds:.0f} s. Set at least {needed}, or lower "
        "OUTBOX_SESSION_SECONDS"
    )


def _limited(instance: dg.DagsterInstance, tags: Mapping[str, str], shards: int) -> Iterator[str]:
    from outbox_pipelines.defs.dagster_internals import queue_settings

    queue = queue_settings(instance)
    for each in queue.tag_concurrency_limits if queue else ():
        key, value, limit = each["key"], each.get("value"), each["limit"]
        if key not in tags or (isinstance(value, str) and value != tags[key]):
            continue
        needed = 2 if key == places.SHARD and value is not None else shards + 1
        if limit < needed:
            yield (
                f"tag_concurrency_limits in dagster.yaml allows {limit} runs with the tag {key}: the "
                f"successor of a relay session never starts. Set at least {needed}"
            )


def others(instance: dg.DagsterInstance, outbox: Outbox) -> int:
    """Return the number of shards of other outboxes that have a session in progress."""
    if _slots(instance) is None:
        return 0
    running = _runs(instance, dg.RunsFilter(statuses=_IN_PROGRESS, tags=SESSION))
    return len({run.tags.get(places.SHARD) for run in running if run.tags.get(NAME) != outbox.name})


@dataclass(frozen=True, slots=True)
class Turn:
    """Why a session ends before its successor starts."""

    reason: str
    successor: str
    """The id of its run."""
    priority: int
    """Below that of all other queued runs."""

    def give(self, instance: dg.DagsterInstance) -> None:
        """Put the successor behind the runs that are queued."""
        from outbox_pipelines.defs.dagster_internals import tag_run

        tag_run(instance, self.successor, {_KEY: str(self.priority)})


def turn(
    instance: dg.DagsterInstance,
    run: dg.DagsterRun,
    outbox: Outbox,
    shard: int,
    *,
    overdue: float,
    session_seconds: float,
    now: float,
) -> Turn | None:
    """Return why a session must end although its successor has no slot; None if it continues.

    Args:
        run: the session's.
        overdue: seconds since the end of its session time.
        now: Unix time.
    """
    slots = _slots_now(instance, run.run_id)
    if slots is None:
        return None
    working = instance.get_run_records(dg.RunsFilter(statuses=_IN_PROGRESS))
    if len(working) < slots or not all(is_session(r.dagster_run) or _is(r, run) for r in working):
        # Another run will free its slot, and the successor is first in the queue.
        return None
    place = places.of_run(run)
    tag = places.shard_tag(place, outbox, shard)
    served = {
        # A session started by hand has no tag.
        tag[places.SHARD] if _is(r, run) else r.dagster_run.tags.get(places.SHARD, r.dagster_run.run_id)
        for r in working
    }
    if len(served) < len(working):
        # A shard has two sessions: one of them is about to end.
        return None
    successors = [
        record
        for record in instance.get_run_records(dg.RunsFilter(statuses=_QUEUED, tags=tag), ascending=True)
        if place is None or places.of_run(record.dagster_run) == place
    ]
    if not successors or not _starts_runs(instance, now):
        # Without a successor the shard would have no relay.
        return None
    queued = _runs(instance, dg.RunsFilter(statuses=_QUEUED), limit=_LOOK_AT, ascending=True)
    # Successors of other sessions do not count: their predecessors are still active.
    others = [each for each in queued if not (is_session(each) and each.tags.get(places.SHARD) in served)]
    patience = min(_PATIENCE, session_seconds / 10) if others else _PATIENCE_ALONE
    # The oldest session ends first; the next one sees that.
    mine = [record for record in working if _is(record, run)]
    before = sum(record.create_timestamp < each.create_timestamp for each in mine for record in working)
    waited = min(overdue, now - successors[0].create_timestamp.timestamp())
    if waited < patience * (1 + before):
        return None
    successor = successors[0].dagster_run.run_id
    lowest = min((_priority(each) for each in others), default=0)
    return Turn(
        f"sessions have all slots (max_concurrent_runs is {slots}); {len(others)} other runs and the "
        f"successor, run {successor[:8]}, are queued: this session ends first",
        successor,
        min(lowest - 1, _HIGHEST),
    )


def put_first(instance: dg.DagsterInstance, sessions: Sequence[dg.DagsterRun]) -> None:
    """Move queued sessions of a shard without a relay to the front again once another run has started."""
    behind = [
        run
        for run in sessions
        if run.status is dg.DagsterRunStatus.QUEUED and is_session(run) and _priority(run) < _HIGHEST
    ]
    if not behind:
        return
    from outbox_pipelines.defs.dagster_internals import tag_run

    if not all(is_session(run) for run in _runs(instance, dg.RunsFilter(statuses=_IN_PROGRESS))):
        for run in behind:
            tag_run(instance, run.run_id, PRIORITY)


def is_session(run: dg.DagsterRun) -> bool:
    """Return whether a run is a relay session, of any outbox and code location."""
    return runs.is_of_package(run) and SESSION.items() <= run.tags.items()


def _runs(instance: dg.DagsterInstance, which: dg.RunsFilter, **options: Any) -> list[dg.DagsterRun]:
    return [record.dagster_run for record in instance.get_run_records(which, **options)]


def _is(record: dg.RunRecord, run: dg.DagsterRun) -> bool:
    return record.dagster_run.run_id == run.run_id


def _slots(instance: dg.DagsterInstance) -> int | None:
    """Return how many runs may be in progress; None if there is no limit."""
    from outbox_pipelines.defs.dagster_internals import queue_settings

    queue = queue_settings(instance)
    allowed = queue.max_concurrent_runs if queue else None
    return None if allowed is None or allowed < 0 else allowed


def _slots_now(instance: dg.DagsterInstance, run_id: str) -> int | None:
    """Return the same by dagster.yaml of now: a run's own instance keeps what it said when the run began."""
    if os.environ.get("DAGSTER_HOME"):
        with dg.DagsterInstance.get() as now:
            # The variable may be that of another instance.
            if now.get_run_by_id(run_id) is not None:
                return _slots(now)
    return _slots(instance)


def _starts_runs(instance: dg.DagsterInstance, now: float) -> bool:
    from outbox_pipelines.defs.dagster_internals import last_heartbeat

    return now - last_heartbeat(instance, _DAEMON) < _DAEMON_SECONDS


def _priority(run: dg.DagsterRun) -> int:
    try:
        return int(run.tags.get(_KEY, 0))
    except ValueError:
        # Dagster treats it as 0.
        return 0
