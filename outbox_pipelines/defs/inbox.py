"""Inboxes of consumers: the asset, the check, the job that drains them and the sensor."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import dagster as dg

from outbox_pipelines.defs import ours, places
from outbox_pipelines.defs.events import OWNERS
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import IN_FLIGHT

if TYPE_CHECKING:
    from outbox_pipelines.consumer.inbox import Backlog

_INBOX = dg.AssetKey(["outbox", "inbox"])
_CONSUMER = "outbox/consumer"
_REPORT_SECONDS = 300.0
# A message that has waited for longer than all of its attempts take is late.
_LATE_SECONDS = 900.0

inbox = dg.AssetSpec(
    _INBOX,
    group_name="outbox",
    owners=OWNERS,
    kinds={"postgres"},
    description="""Events that consumers have received and not yet handled: events of slow handlers, and those
whose handling failed. The sensor `inbox` observes them for the consumers of OUTBOX_DRAIN_CONSUMERS: the
number of waiting events, the longest wait, and dead letters.

When it grows: see the runs of `drain_inbox`; `outbox consumer status` and `outbox consumer dead-letters
list` show what fails (docs/consuming.md).
""",
)


@dg.op(
    config_schema={"consumer": dg.Field(str, description="module:name, as in OUTBOX_DRAIN_CONSUMERS")},
    description="Handles the due events in a consumer's inbox.",
)
def drain(context: dg.OpExecutionContext, outbox_pipelines: OutboxResource) -> None:
    from outbox_pipelines.consumer import loading

    name = context.op_config["consumer"]
    seconds = outbox_pipelines.settings().session_seconds
    context.log.info(f"{name}: draining until nothing is due, for at most {seconds:.0f} s")
    counts = loading.drain(loading.load(name), until_empty=True, seconds=seconds)
    context.log.info(f"{name}: {counts}")
    context.add_output_metadata(dataclasses.asdict(counts))


@dg.job(
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    name="drain_inbox",
    description="""Handles the due events in a consumer's inbox, each key in its order, and ends.

Use: the sensor `inbox` starts it for the consumers of OUTBOX_DRAIN_CONSUMERS. By hand: give the
consumer's name, module:name, in the run's config. Several runs, and the consumer's own processes, can drain
at the same time: no event is handled twice.

When it fails: the consumer could not be loaded, or its database is unavailable; run it again. Events whose
handling fails do not fail the run (see `outbox consumer dead-letters list`).
""",
)
def drain_inbox() -> None:
    drain()


@dg.asset_check(
    asset=_INBOX,
    name="handled",
    description="""Whether the consumers of OUTBOX_DRAIN_CONSUMERS handle the events they receive.

Warns if a message has waited for more than 15 minutes; fails if there are dead letters. The sensor
`inbox` reports it without a run: at once when it changes, otherwise every 5 minutes.

When it fails: `outbox consumer dead-letters list` shows why events were not handled; correct the cause, then
run `outbox consumer dead-letters replay`. When it warns: see the runs of `drain_inbox`, or start more.
""",
)
def handled(outbox_pipelines: OutboxResource) -> dg.AssetCheckResult:
    looks = _looks(outbox_pipelines.settings().drain_consumers.split())
    return dg.AssetCheckResult(**_verdict([backlog for backlog, _ in looks.values()]))


@dg.sensor(
    name="inbox",
    target=drain_inbox,
    minimum_interval_seconds=15,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="""Starts `drain_inbox` for each consumer of OUTBOX_DRAIN_CONSUMERS that has due events in its
inbox, one run per consumer at a time. Reports the check `handled` of `outbox/inbox` and observes the backlog
there: when it changes, and every 5 minutes. Without OUTBOX_DRAIN_CONSUMERS it does nothing: consumers drain
their own inboxes.

When a tick fails: a name in OUTBOX_DRAIN_CONSUMERS is wrong, or a consumer's database is unavailable; the
next tick retries.
""",
)
def inbox_sensor(
    context: dg.SensorEvaluationContext, outbox_pipelines: OutboxResource
) -> dg.SensorResult | dg.SkipReason:
    names = outbox_pipelines.settings().drain_consumers.split()
    if not names:
        return dg.SkipReason("no consumer to drain: OUTBOX_DRAIN_CONSUMERS is empty")
    looks = _looks(names)
    requests = [
        dg.RunRequest(run_config={"ops": {"drain": {"config": {"consumer": name}}}}, tags={_CONSUMER: name})
        for name, (_, is_due) in looks.items()
        if is_due and not _is_at_work(context, name)
    ]
    backlogs = [backlog for backlog, _ in looks.values()]
    verdict = _verdict(backlogs)
    verdict["metadata"] |= places.mark(context)
    state = [verdict["passed"], any(each.waiting for each in backlogs)]
    kept: dict[str, Any] = json.loads(context.cursor or '{"state": null, "at": 0.0}')
    is_news = state != kept["state"] or time.time() - kept["at"] >= _REPORT_SECONDS
    reports: list[Any] = [
        dg.AssetObservation(_INBOX, metadata=_numbers(backlogs)),
        dg.AssetCheckEvaluation(asset_key=_INBOX, check_name="handled", **verdict),
    ]
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else dg.SkipReason(verdict["description"]),
        asset_events=reports if is_news else [],
        cursor=json.dumps({"state": state, "at": time.time() if is_news else kept["at"]}),
    )


def _looks(names: list[str]) -> dict[str, tuple["Backlog", bool]]:
    """Return the backlog of each consumer, and whether an event is due."""
    from outbox_pipelines.consumer import loading

    return {name: loading.backlog(loading.load(name)) for name in names}


def _verdict(backlogs: list["Backlog"]) -> dict[str, Any]:
    dead = sum(each.dead_letters for each in backlogs)
    late = [each for each in backlogs if (each.oldest_seconds or 0.0) > _LATE_SECONDS]
    told = [
        f"{each.source}: {each.waiting:,} waiting"
        + (f" for up to {each.oldest_seconds:,.0f} s" if each.oldest_seconds is not None else "")
        + (f", {each.dead_letters:,} dead letters" if each.dead_letters else "")
        for each in backlogs
    ]
    return {
        "passed": not dead and not late,
        "severity": dg.AssetCheckSeverity.ERROR if dead else dg.AssetCheckSeverity.WARN,
        "description": "; ".join(told) or "OUTBOX_DRAIN_CONSUMERS names no consumer",
        "metadata": _numbers(backlogs),
    }


def _numbers(backlogs: list["Backlog"]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for each in backlogs:
        numbers[f"{each.source} waiting"] = each.waiting
        numbers[f"{each.source} dead letters"] = each.dead_letters
        numbers[f"{each.source} oldest seconds"] = round(each.oldest_seconds or 0.0, 1)
    return numbers


def _is_at_work(context: dg.SensorEvaluationContext, name: str) -> bool:
    in_flight = dg.RunsFilter(statuses=IN_FLIGHT, tags={_CONSUMER: name})
    return any(places.is_here(context, run) for run in context.instance.get_runs(in_flight))
