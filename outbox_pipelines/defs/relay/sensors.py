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
    # The daemon looks at its sensors every five seconds, and then takes those whose interval is over: with 5,
    # every third tick or so comes a moment too early and is left out.
    minimum_interval_seconds=1,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="""Keeps every shard relayed: launches `relay_session` where nobody relays a shard, and a
successor shortly before the owner's time is over. A skipped tick says who relays the shard.

Use: leave it on. A shard that a standalone `outbox relay` holds is left to it, so with the relay as a service
of its own the sensor only watches. To stop relaying, turn the sensor off, then terminate the run.

When a tick fails, nobody watches the relay: the error says in one line what to mend (settings, database,
schema). The session that runs goes on meanwhile. When sessions fail one after the other, the next
tries wait for 10 s, 20 s, and so on up to 5 minutes: the failed run says what to mend.
""",
)
def relay_supervisor(
    context: dg.SensorEvaluationContext, outbox_pipelines: OutboxResource
) -> dg.SensorResult:
    """A tick. `SetupError` is left to fail it: red is what an operator should see of a database that is away,
    and a skipped tick would look like all is well."""
    # Here, because definitions are to load without the drivers.
    from outbox_pipelines.quality import measurements

    settings = outbox_pipelines.settings()
    settings.require_kafka()
    requests, reasons = [], []
    place = places.of_tick(context)
    shards = measurements.read(settings).shards
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
            # Pods start slowly; Dagster itself ends a run that takes longer.
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
    """The shard's runs, the newest first; of this code location: others may relay other outboxes."""
    records = context.instance.get_run_records(
        dg.RunsFilter(statuses=statuses, tags=places.shard_tag(places.of_tick(context), shard)), limit=limit
    )
    return [record for record in records if places.is_here(context, record.dagster_run)]


def _end_lost(context: dg.SensorEvaluationContext, verdict: Verdict) -> None:
    for run in verdict.lost:
        context.log.warning(f"run {run.run_id} has no process any more: marked as failed")
        context.instance.report_run_failed(
            run,
            "The process is gone: it neither holds the shard nor waits for it (seen by relay_supervisor).",
        )
