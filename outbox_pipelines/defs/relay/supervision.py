"""Decides whether a shard needs another session.

Invariants:
- The owner of a shard is read from the database (its lock, its heartbeat), never from a run's status: a run
  that was killed together with its code server stays STARTED.
- A status counts for two things: a run that changed it within the last minute may still be starting, and a
  starting run is not marked as failed before the instance's own limit (`start_timeout_seconds`).
- An extra session does no harm (it finds the shard owned and a successor waiting, and ends); a missing one
  does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from outbox_pipelines.quality.measurements import ShardStatus


_DAGSTER = "dagster run "


# From the launch of a run until it owns the shard or waits for it: 3 to 8 s on two cores, more under load.
START_SECONDS = 60.0
# Seconds after which a run that neither owns the shard nor waits for it is considered lost.
LOST_SECONDS = 60.0
# Sessions that fail this quickly in a row will fail again: the pause before the next attempt doubles.
QUICK_SECONDS = 60.0
FIRST_PAUSE = 10.0
LONGEST_PAUSE = 300.0
# More failures than this do not increase the pause.
RUNS_TO_LOOK_BACK = 7


def owner_of(run_id: str, place: str) -> str:
    """Return the owner's name for a run, with the run id as short as on Dagster's pages."""
    return f"{_run(run_id)} on {place}"


def is_session(owner: str) -> bool:
    """Return whether the shard's owner is a Dagster run."""
    return owner.startswith(_DAGSTER)


def is_run(owner: str | None, run_id: str) -> bool:
    """Return whether this run owns the shard."""
    return owner is not None and owner.startswith(f"{_run(run_id)} ")


def _run(run_id: str) -> str:
    return f"{_DAGSTER}{run_id[:8]}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do for a shard, and why."""

    launch: bool
    reason: str
    lost: list[dg.DagsterRun]
    """Runs without a process; they would take a slot of the queue's limit permanently."""


def judge(
    shard: ShardStatus,
    unfinished: Sequence[dg.RunRecord],
    finished: Sequence[dg.RunRecord],
    *,
    session_seconds: float,
    now: float,
    start_seconds: float = START_SECONDS,
) -> Verdict:
    """Decide what to do for a shard, from its state and its runs.

    Args:
        unfinished: the shard's runs that are queued, starting or started.
        finished: the runs that ended last, newest first.
        session_seconds: seconds after which the owner hands over.
        start_seconds: seconds that the instance allows a run for its start.
    """
    others = [record for record in unfinished if not is_run(shard.owner, record.dagster_run.run_id)]
    coming = [record.dagster_run for record in others if _is_coming(record, now)]
    gone = [each.dagster_run for each in others if not _may_come(each, now, start_seconds)]
    lost = [] if _may_have_a_place(shard) else gone
    wanted, reason = _want(shard, session_seconds)
    if wanted and coming:
        wanted, reason = False, f"{reason}; run {coming[0].run_id[:8]} is starting"
    elif wanted and (pause := _pause(finished, now)) > 0:
        wanted, reason = False, f"{reason}; the last sessions failed quickly, next attempt in {ceil(pause)} s"
    return Verdict(wanted, reason, lost)


def _want(shard: ShardStatus, session_seconds: float) -> tuple[bool, str]:
    """Return whether the shard lacks an owner or a successor, and its state as text."""
    name = f"shard {shard.shard}"
    if shard.owner is None:
        return True, f"{name} has no active relay"
    if not is_session(shard.owner):
        return False, f"{name} is relayed by {shard.owner}, which Dagster did not start"
    held = shard.owned_seconds or 0.0
    state = f"{name} has been relayed by {shard.owner} for {held:.0f} s"
    if shard.successor_waits:
        return False, f"{state}, and a successor waits"
    # Early enough for a process to start, however short the sessions are.
    lead = min(START_SECONDS, session_seconds / 10)
    return held >= session_seconds - lead, state


def _is_coming(record: dg.RunRecord, now: float) -> bool:
    # A queued run waits for the daemon, which is alive: it runs the supervisor.
    return (
        record.dagster_run.status is dg.DagsterRunStatus.QUEUED
        or now - record.update_timestamp.timestamp() < START_SECONDS
    )


def _may_come(record: dg.RunRecord, now: float, start_seconds: float) -> bool:
    """Return whether a run may still start, even if another one is launched without waiting for it."""
    is_starting = record.dagster_run.status in (dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTING)
    since = now - record.update_timestamp.timestamp()
    return _is_coming(record, now) or (is_starting and since < start_seconds)


def _may_have_a_place(shard: ShardStatus) -> bool:
    """Return whether a run that does not own the shard now may be its successor or its previous owner."""
    since = shard.heartbeat_seconds if shard.owner is None else shard.owned_seconds
    return shard.successor_waits or (since is not None and since < LOST_SECONDS)


def _pause(finished: Sequence[dg.RunRecord], now: float) -> float:
    """Return how many seconds to wait, so that repeated failures do not fill Dagster's storage."""
    failures = len(list(takewhile(_failed_quickly, finished)))
    # A single failure may be an accident (a worker was killed): only repeated failures cause a pause.
    if failures < 2:
        return 0.0
    ended = finished[0].end_time or finished[0].update_timestamp.timestamp()
    return min(FIRST_PAUSE * 2.0 ** (failures - 2), LONGEST_PAUSE) - (now - ended)


def _failed_quickly(record: dg.RunRecord) -> bool:
    started, ended = record.start_time, record.end_time
    quickly = started is None or ended is None or ended - started < QUICK_SECONDS
    return record.dagster_run.status is dg.DagsterRunStatus.FAILURE and quickly
