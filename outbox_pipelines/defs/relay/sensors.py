"""The sensor that keeps every shard relayed."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time

import dagster as dg

from outbox_pipelines.defs import places
from outbox_pipelines.defs.relay import queue
from outbox_pipelines.defs.relay.jobs import config, relay_session
from outbox_pipelines.defs.relay.supervision import RUNS_TO_LOOK_BACK, Verdict, judge
from outbox_pipelines.defs.resources import OutboxResource

_UNFINISHED = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


@dg.sensor(
    target=relay_session,
    # The daemon checks its sensors every five seconds and runs those whose interval is over. With an interval
    # of 5, about every third check would come slightly too early and skip the tick.
    minimum_interval_seconds=1,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="""Keeps every shard relayed: launches `relay_session` for a shard without an active relay,
and a successor shortly before the owner's time is over. A skipped tick names the owner of each shard.

Use: leave it on. The sensor launches nothing for a shard that a standalone `outbox relay` owns; if the relay
runs as a separate service, the sensor only watches. To stop relaying, turn the sensor off, then terminate the
run.

When a tick fails, the relay is not supervised: the error says in one line what to correct (settings,
database, schema). A running session continues. When several sessions fail in a row, the next
attempts wait for 10 s, 20 s, and so on up to 5 minutes: the failed run says what to correct.
""",
)
def relay_supervisor(
    context: dg.SensorEvaluationContext, outbox_pipelines: OutboxResource
) -> dg.SensorResult:
    """Return the sessions to launch. A `SetupError` fails the tick, so that an operator sees an unavailable
    database in red; a skipped tick would look healthy."""
    # Imported here so that definitions load without the drivers.
    from outbox_pipelines.relay import measuring

    settings = outbox_pipelines.settings()
    settings.require_kafka()
    requests, reasons = [], []
    place = places.of_tick(context)
    shards = measuring.read(settings).shards
    few = queue.too_few(context.instance, len(shards))
    if few:
        context.log.warning(few)
        reasons.append(few)
    for shard in shards:
        unfinished = _runs(context, shard.shard, _UNFINISHED)
        if shard.owner is None:
            queue.put_first(context.instance, [record.dagster_run for record in unfinished])
        verdict = judge(
            shard,
            unfinished,
            _runs(context, shard.shard, _FINISHED, limit=RUNS_TO_LOOK_BACK),
            session_seconds=settings.session_seconds,
            now=time.time(),
            # Pods start slowly; Dagster itself ends a run that takes longer to start.
            start_seconds=float(context.instance.run_monitoring_start_timeout_seconds),
        )
        _end_lost(context, verdict)
        reasons.append(verdict.reason)
        if verdict.launch:
            context.log.info(verdict.reason)
            requests.append(
                dg.RunRequest(
                    run_config=config(shard=shard.shard),
                    tags=places.shard_tag(place, shard.shard) | queue.PRIORITY,
                )
            )
    return dg.SensorResult(run_requests=requests, skip_reason=None if requests else "; ".join(reasons))


def _runs(
    context: dg.SensorEvaluationContext,
    shard: int,
    statuses: list[dg.DagsterRunStatus],
    limit: int | None = None,
) -> list[dg.RunRecord]:
    """Return the shard's runs of this code location, newest first: others may relay other outboxes."""
    records = context.instance.get_run_records(
        dg.RunsFilter(statuses=statuses, tags=places.shard_tag(places.of_tick(context), shard)), limit=limit
    )
    return [record for record in records if places.is_here(context, record.dagster_run)]


def _end_lost(context: dg.SensorEvaluationContext, verdict: Verdict) -> None:
    for run in verdict.lost:
        context.log.warning(f"the process of run {run.run_id} has ended: run marked as failed")
        context.instance.report_run_failed(
            run,
            "The process has ended: it neither owns the shard nor waits for it (seen by relay_supervisor).",
        )
