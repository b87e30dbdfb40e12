"""The sensor that keeps every shard relayed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import places, ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.relay import queue
from outbox_pipelines.defs.relay.assets import config
from outbox_pipelines.defs.relay.supervision import RUNS_TO_LOOK_BACK, Verdict, judge

_UNFINISHED: Final = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
_FINISHED: Final = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
# Reasons in a tick.
_SHOWN: Final = 3
_RELAY_SUPERVISOR: Final = """\
Launches `relay_session` for each shard without an active relay, and a successor shortly before the owner's
time is over. Leave it on: it launches nothing for a shard that a relay outside Dagster owns. To stop
relaying, turn it off, then terminate the run. A skipped tick names the owner of each shard, or what to
correct.
"""


def relay_supervisor(outboxes: Sequence[Outbox], sessions: Sequence[dg.JobDefinition]) -> dg.SensorDefinition:
    """Return the sensor that launches relay sessions.

    Args:
        sessions: the job `relay_session` of each outbox.
    """
    return ticks.sensor(
        outboxes,
        "relay_supervisor",
        _supervise,
        jobs=sessions,
        # The daemon checks its sensors every five seconds and runs those whose interval is over. With an
        # interval of 5, about every third check would come slightly too early and skip the tick.
        seconds=1,
        reads=lambda settings: bool(settings.kafka),
        description=_RELAY_SUPERVISOR,
    )


def _supervise(context: dg.SensorEvaluationContext, reading: ticks.Reading, cursor: str | None) -> ticks.Tick:
    """Return the sessions to launch."""
    from outbox_pipelines.defs.dagster_internals import start_seconds

    outbox, settings = reading.outbox, reading.settings()
    settings.require_kafka()
    requests: list[dg.RunRequest] = []
    wrong: list[str] = []
    well: list[str] = []
    place = places.of_tick(context)
    shards = reading.measurements().shards
    # Sessions of other outboxes take slots too; they matter where one of this outbox has none.
    others = queue.others(context.instance, outbox) if any(each.owner is None for each in shards) else 0
    tags = outbox.run_tags | queue.SESSION | places.shard_tag(place, outbox, 0)
    troubles = queue.troubles(
        context.instance,
        tags,
        shards=len(shards),
        others=others,
        session_seconds=settings.session_seconds,
    )
    # In the log once, in full; a tick comes every five seconds.
    if (said := "\n".join(troubles)) and said != cursor:
        context.log.warning(said)
    wrong += [ticks.short(trouble) for trouble in troubles]
    for shard in shards:
        tag = places.shard_tag(place, outbox, shard.shard)
        unfinished = _runs(context, tag, _UNFINISHED)
        if shard.owner is None:
            queue.put_first(context.instance, [record.dagster_run for record in unfinished])
        verdict = judge(
            shard,
            unfinished,
            _runs(context, tag, _FINISHED, limit=RUNS_TO_LOOK_BACK),
            session_seconds=settings.session_seconds,
            now=time.time(),
            # Pods start slowly; Dagster itself ends a run that takes longer to start.
            start_seconds=start_seconds(context.instance),
        )
        _end_lost(context, verdict)
        (wrong if shard.owner is None else well).append(verdict.reason)
        if verdict.launch:
            context.log.info(plain(verdict.reason))
            requests.append(
                dg.RunRequest(
                    job_name=outbox.name_of("relay_session"),
                    run_config=config(shard=shard.shard),
                    tags=tag | queue.PRIORITY,
                )
            )
    if len(well) > 1:
        well = [f"{len(well)} shards are relayed"]
    return ticks.Tick("; ".join([*wrong[:_SHOWN], *well]), said or None, requests, is_wrong=bool(wrong))


def _runs(
    context: dg.SensorEvaluationContext,
    tag: dict[str, str],
    statuses: list[dg.DagsterRunStatus],
    limit: int | None = None,
) -> list[dg.RunRecord]:
    """Return the shard's runs of this code location, newest first: others may relay other outboxes."""
    records = context.instance.get_run_records(dg.RunsFilter(statuses=statuses, tags=tag), limit=limit)
    return [record for record in records if places.is_here(context, record.dagster_run)]


def _end_lost(context: dg.SensorEvaluationContext, verdict: Verdict) -> None:
    from outbox_pipelines.defs.dagster_internals import fail_run

    for run in verdict.lost:
        context.log.warning(f"the process of run {run.run_id} has ended: run marked as failed")
        fail_run(
            context.instance,
            run,
            "The process has ended: it neither owns the shard nor waits for it (seen by relay_supervisor).",
        )
