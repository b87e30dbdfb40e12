"""Inboxes of consumers, drained and measured from Dagster."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import dataclasses
import json
import time
from typing import Any

import dagster as dg

from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import IN_FLIGHT

_INBOX = dg.AssetKey(["outbox", "inbox"])
_CONSUMER = "outbox/consumer"
_OBSERVE_SECONDS = 300.0

inbox = dg.AssetSpec(
    _INBOX,
    group_name="outbox",
    kinds={"postgres"},
    description="""What consumers have received and not handled yet: events of slow handlers, and those whose
handling failed. Observed by the sensor `inbox`, for the consumers that OUTBOX_DRAIN names: how many wait, for
how long, and dead letters.

When it grows: see the runs of `drain_inbox`; `outbox consumer status` and `outbox consumer dead-letters
list` say what fails (docs/consuming.md).
""",
)


@dg.op(
    name="drain_inbox",
    config_schema={"consumer": dg.Field(str, description="module:name, as in OUTBOX_DRAIN")},
    description="Handles what is due in a consumer's inbox.",
)
def drain(context: dg.OpExecutionContext, outbox: OutboxResource) -> None:
    from outbox_pipelines.consumer import loading

    name = context.op_config["consumer"]
    seconds = outbox.settings().session_seconds
    context.log.info(f"{name}: until nothing is due, {seconds:.0f} s at most")
    counts = loading.drain(loading.load(name), until_empty=True, seconds=seconds)
    context.log.info(f"{name}: {counts}")
    context.add_output_metadata(dataclasses.asdict(counts))


@dg.job(
    name="drain_inbox",
    description="""Handles what is due in a consumer's inbox, each key in its order, and ends.

Use: the sensor `inbox` starts it for the consumers that OUTBOX_DRAIN names. By hand: give the consumer's
name, module:name, in the run's config. It can run beside itself, and beside the consumer's own processes:
nothing is handled twice.

When it fails: the consumer could not be loaded, or its database is away; events whose handling fails do not
fail the run (see `outbox consumer dead-letters list`). Run it again.
""",
)
def drain_inbox() -> None:
    drain()


@dg.sensor(
    name="inbox",
    job=drain_inbox,
    minimum_interval_seconds=15,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="""Starts `drain_inbox` for each consumer that OUTBOX_DRAIN names and that has something due
in its inbox, one run for each at a time; and observes on `outbox/inbox` how far it is behind, every 5
minutes and when it is empty again. Without OUTBOX_DRAIN it does nothing: consumers drain by themselves.

When a tick fails: a name in OUTBOX_DRAIN is wrong, or a consumer's database is away; the next tick tries
again.
""",
)
def inbox_sensor(
    context: dg.SensorEvaluationContext, outbox: OutboxResource
) -> dg.SensorResult | dg.SkipReason:
    from outbox_pipelines.consumer import loading

    names = outbox.settings().drain.split()
    if not names:
        return dg.SkipReason("no consumer is to be drained from here: OUTBOX_DRAIN names none")
    kept: dict[str, Any] = json.loads(context.cursor or "{}")
    requests, waiting = [], []
    observed: dict[str, Any] = {}
    for name in names:
        backlog, is_due = loading.backlog(loading.load(name))
        waiting.append(f"{name}: {backlog.waiting:,} waiting")
        observed |= {
            f"{backlog.source} waiting": backlog.waiting,
            f"{backlog.source} dead letters": backlog.dead_letters,
        }
        observed[f"{backlog.source} oldest seconds"] = round(backlog.oldest_seconds or 0.0, 1)
        if is_due and not _is_at_work(context.instance, name):
            config = {"ops": {"drain_inbox": {"config": {"consumer": name}}}}
            requests.append(dg.RunRequest(run_config=config, tags={_CONSUMER: name}))
    is_empty = not any(value for what, value in observed.items() if what.endswith(" waiting"))
    is_news = is_empty != kept.get("empty") or time.time() - kept.get("at", 0.0) >= _OBSERVE_SECONDS
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else dg.SkipReason("; ".join(waiting)),
        asset_events=[dg.AssetObservation(_INBOX, metadata=observed)] if is_news else [],
        cursor=json.dumps({"empty": is_empty, "at": time.time() if is_news else kept["at"]}),
    )


def _is_at_work(instance: dg.DagsterInstance, name: str) -> bool:
    in_flight = dg.RunsFilter(statuses=IN_FLIGHT, tags={_CONSUMER: name})
    return bool(instance.get_run_records(in_flight, limit=1))
