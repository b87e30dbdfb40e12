"""Inboxes of consumers: the asset, the check, the job that drains them and the sensor."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.core.text import counted, markdown, short
from outbox_pipelines.defs import places, ticks
from outbox_pipelines.defs.jobs import op_job
from outbox_pipelines.defs.outbox import NAME, Outbox
from outbox_pipelines.defs.pages import one_line
from outbox_pipelines.defs.runs import IN_FLIGHT
from outbox_pipelines.defs.ticks import HOUR, Reported
from outbox_pipelines.quality.rules import Status

if TYPE_CHECKING:
    from outbox_pipelines.consumer.inbox import Backlog

_CONSUMER = "outbox/consumer"
# A message that has waited for longer than all of its attempts take is late.
_LATE_SECONDS = 900.0
_MOST_PAUSED = 5

_INBOX: Final = """\
Events that consumers have received and not yet handled: events of slow handlers, and those
whose handling failed. The sensor `inbox` observes them for the consumers of OUTBOX_DRAIN_CONSUMERS: the
number of waiting events, the longest wait, and dead letters.

When it grows: see the runs of `drain_inbox`; `outbox consumer status` and `outbox consumer dead-letters
list` show what fails (docs/consuming-failures.md).
"""


def inbox(outbox: Outbox) -> dg.AssetSpec:
    """Return the asset `inbox`."""
    return outbox.spec("inbox", _INBOX, {"postgres"}, deps=[])


def drain_inbox(outbox: Outbox) -> dg.JobDefinition:
    """Return the job `drain_inbox`."""

    @op_job(
        outbox,
        "drain_inbox",
        _DRAIN_INBOX,
        config_schema={"consumer": dg.Field(str, description="module:name, as in OUTBOX_DRAIN_CONSUMERS")},
    )
    def drain(context: dg.OpExecutionContext) -> None:
        """Handles the due events in a consumer's inbox."""
        from outbox_pipelines.consumer import loading

        with one_line(outbox):
            name = context.op_config["consumer"]
            seconds = outbox.load_settings().session_seconds
            context.log.info(f"{name}: draining until nothing is due, for at most {seconds:.0f} s")
            counts = loading.drain(loading.load(name), until_empty=True, seconds=seconds)
            context.log.info(f"{name}: {counts}")
        context.add_output_metadata(dataclasses.asdict(counts))

    return drain


_DRAIN_INBOX: Final = """\
Handles the due events in a consumer's inbox, each key in its order, and ends.

Use: the sensor `inbox` starts it for the consumers of OUTBOX_DRAIN_CONSUMERS. By hand: give the
consumer's name, module:name, in the run's config. Several runs, and the consumer's own processes, can drain
at the same time: no event is handled twice.

When it fails: the consumer could not be loaded, or its database is unavailable; run it again. Events whose
handling fails do not fail the run (see `outbox consumer dead-letters list`).
"""


_HANDLED: Final = """\
Whether the consumers of OUTBOX_DRAIN_CONSUMERS handle the events they receive.

Warns if a message has waited for more than 15 minutes; fails if there are dead letters. The sensor
`inbox` reports it without a run: at once when it changes, and otherwise rarely.

When it fails: `outbox consumer dead-letters list` shows why events were not handled; correct the cause, then
run `outbox consumer dead-letters replay`. When it warns: see the runs of `drain_inbox`, or start more.
"""


def handled(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return the check `handled`."""

    @dg.asset_check(
        asset=outbox.key("inbox"),
        name="handled",
        description=outbox.text(_HANDLED),
    )
    def handled() -> dg.AssetCheckResult:
        looks = _looks(outbox.load_settings().drain_consumers.split())
        return dg.AssetCheckResult(**_verdict([backlog for backlog, _ in looks.values()]))

    return handled


_INBOX_SENSOR: Final = """\
Starts `drain_inbox` for each consumer of OUTBOX_DRAIN_CONSUMERS that has due events in its inbox, and reports
the check `handled` of `outbox/inbox`. A skipped tick names a wrong consumer or an unavailable database.
"""


def inbox_sensor(outboxes: Sequence[Outbox], jobs: Sequence[dg.JobDefinition]) -> dg.SensorDefinition:
    """Return the sensor that starts `drain_inbox`.

    Args:
        jobs: the job `drain_inbox` of each outbox.
    """
    return ticks.sensor(outboxes, "inbox", _drain_due, jobs=jobs, seconds=15, description=_INBOX_SENSOR)


def _drain_due(context: dg.SensorEvaluationContext, reading: ticks.Reading, cursor: str | None) -> ticks.Tick:
    outbox = reading.outbox
    names = reading.settings().drain_consumers.split()
    if not names:
        return ticks.Tick("no consumer to drain: OUTBOX_DRAIN_CONSUMERS is empty", cursor)
    looks = _looks(names)
    requests = [
        dg.RunRequest(
            job_name=outbox.name_of("drain_inbox"),
            run_config={"ops": {"drain": {"config": {"consumer": name}}}},
            tags={_CONSUMER: name, NAME: outbox.name},
        )
        for name, (_, is_due) in looks.items()
        if is_due and not _is_at_work(context, outbox, name)
    ]
    backlogs = [backlog for backlog, _ in looks.values()]
    verdict = _verdict(backlogs)
    verdict["metadata"] |= places.mark(context, outbox)
    kept: dict[str, Any] = json.loads(cursor or '{"check": [], "observed": 0.0}')
    last, observed, now = Reported(*kept["check"]), kept["observed"], time.time()
    key = outbox.key("inbox")
    results = {dg.AssetCheckKey(key, "handled"): verdict}
    reported: list[Any] = [*ticks.due(context.instance, {"handled": last}, results, now)]
    if reported or now - observed >= HOUR:
        reported.insert(0, dg.AssetObservation(key, metadata=_numbers(backlogs)))
        observed = now
    return ticks.Tick(
        verdict["description"],
        json.dumps({"check": dataclasses.astuple(last), "observed": observed}),
        requests,
        reported,
    )


def _looks(names: list[str]) -> dict[str, tuple["Backlog", bool]]:
    """Return the backlog of each consumer, and whether an event is due."""
    from outbox_pipelines.consumer import loading

    return {name: loading.backlog(loading.load(name)) for name in names}


def _state(backlogs: list["Backlog"]) -> Status:
    if any(each.dead_letters for each in backlogs):
        return Status.ERROR
    is_late = any((each.oldest_seconds or 0.0) > _LATE_SECONDS for each in backlogs)
    return Status.WARN if is_late else Status.OK


def _verdict(backlogs: list["Backlog"]) -> dict[str, Any]:
    state = _state(backlogs)
    lines = [
        f"{each.source}: {each.waiting:,} waiting"
        + (f" for up to {each.oldest_seconds:,.0f} s" if each.oldest_seconds is not None else "")
        + (f", {counted(each.dead_letters, 'dead letter')}" if each.dead_letters else "")
        + "".join(
            f", paused: {short(it.event_type or '(no event)')} ({it.error or 'the first try has not ended'})"
            for it in each.paused[:_MOST_PAUSED]
        )
        for each in backlogs
    ]
    return {
        "passed": state is Status.OK,
        "severity": dg.AssetCheckSeverity.ERROR if state is Status.ERROR else dg.AssetCheckSeverity.WARN,
        "description": markdown("; ".join(lines)) or "OUTBOX_DRAIN_CONSUMERS names no consumer",
        "metadata": _numbers(backlogs),
    }


def _numbers(backlogs: list["Backlog"]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for each in backlogs:
        numbers[f"{each.source} waiting"] = each.waiting
        numbers[f"{each.source} dead letters"] = each.dead_letters
        numbers[f"{each.source} oldest seconds"] = round(each.oldest_seconds or 0.0, 1)
    return numbers


def _is_at_work(context: dg.SensorEvaluationContext, outbox: Outbox, name: str) -> bool:
    in_flight = dg.RunsFilter(statuses=IN_FLIGHT, tags={_CONSUMER: name, NAME: outbox.name})
    return any(
        places.is_here(context, record.dagster_run) for record in context.instance.get_run_records(in_flight)
    )
