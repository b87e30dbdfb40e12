"""The sensor that sends alerts: failed checks and failed runs."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.core.text import plain
from outbox_pipelines.defs import places, runs, ticks
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import said
from outbox_pipelines.defs.runs import DAY
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.quality.alerts import Known, Problem
    from outbox_pipelines.settings import Settings

_AT_ONCE = 100
# Dagster's messages about a process that ended, and about a run that something else marked as failed.
_KILLED = re.compile("was terminated by signal|unexpectedly exited")
_OUTSIDE = "This run has been marked as failed from outside"
# A failure that was not retried is dropped from the report after this time.
_FORGET_SECONDS = 7 * 86_400.0
_ALERTS: Final = """\
Sends alerts to OUTBOX_ALERTS: failed checks, an unavailable database, failed runs. Each problem has one
message when it has lasted for OUTBOX_ALERT_AFTER_SECONDS, and one when it is resolved. Test it with outbox
alerts test. Set OUTBOX_UI_URL to the address of these pages. A skipped tick says which address refuses
messages.
"""


def alerts_sensor(outboxes: Sequence[Outbox]) -> dg.SensorDefinition:
    """Return the sensor that sends alerts."""
    return ticks.sensor(
        outboxes,
        "alerts",
        _send,
        seconds=30,
        reads=lambda settings: bool(settings.alerts),
        description=_ALERTS,
    )


def _send(context: dg.SensorEvaluationContext, reading: ticks.Reading, cursor: str | None) -> ticks.Tick:
    from outbox_pipelines.quality import alerts

    outbox, settings = reading.outbox, reading.settings()
    if not settings.alerts:
        return ticks.Tick("no alert addresses configured: set OUTBOX_ALERTS", cursor)
    now = time.time()
    # Problems from before the first tick are not reported.
    kept: dict[str, Any] = {"known": {}, "unsent": {}, "runs": {}, "begun": now, "after": now}
    if cursor:
        kept = json.loads(cursor)
    failures, forgotten = _failures(context, outbox, kept, now)
    before = alerts.from_json(kept["known"])
    known = {key: one for key, one in before.items() if key not in forgotten}
    of_the_outbox, relayed = _of_the_outbox(reading, known)
    # Do not wait until a session ends, after ten minutes: the next one relays within seconds.
    for what in [what for what, one in failures.items() if one.get("shard") in relayed]:
        failures.pop(what)
        kept["runs"].pop(what, None)
    messages, known = alerts.news(
        known,
        [
            *of_the_outbox,
            *_of_the_instance(context, outbox, now),
            *(_of_a_run(settings, what, one) for what, one in failures.items()),
        ],
        now=now,
        after=settings.alert_after_seconds,
        where=alerts.where(settings),
    )
    unsent = {address: [alerts.Message(**one) for one in ones] for address, ones in kept["unsent"].items()}
    outcomes = alerts.send(settings, messages, unsent) if messages or unsent else []
    failed = [each for each in outcomes if each.unsent]
    for each in failed:
        if each.address not in kept["unsent"]:
            why = plain(each.why)
            context.log.warning(f"{each.address} did not accept the message and gets it again: {why}")
    kept["known"] = alerts.to_json(known)
    kept["unsent"] = {each.address: [asdict(one) for one in each.unsent] for each in failed}
    open_problems = [key for key, one in known.items() if one.is_reported]
    reason = (
        f"reported and not resolved: {ticks.listed(open_problems)}" if open_problems else "nothing to report"
    )
    if failed:
        reason = (
            f"{ticks.listed([each.address for each in failed])} did not accept: {failed[0].why}; {reason}"
        )
    return ticks.Tick(reason, json.dumps(kept), is_wrong=bool(failed))


def _of_the_outbox(reading: ticks.Reading, known: Mapping[str, "Known"]) -> tuple[list["Problem"], set[str]]:
    """Return the problems of the outbox, and the shards that have an active relay."""
    import psycopg

    from outbox_pipelines.quality.alerts import Problem, of_results
    from outbox_pipelines.quality.rules import OF_CONNECTOR, RULES, chapter, judge

    settings = reading.settings()
    # A problem that cannot be measured is not resolved.
    unseen = [Problem(rule.name, known[rule.name].text, rule.help) for rule in RULES if rule.name in known]
    remedy = f"nothing is relayed; check with `outbox status` ({chapter(settings, 'database')})"
    try:
        measurements = reading.measurements()
    except (SetupError, psycopg.Error) as error:
        return [Problem("database", said(reading.outbox, error) or "", remedy), *unseen], set()
    relayed = {str(shard.shard) for shard in measurements.shards if shard.owner is not None}
    results = judge(settings, measurements)
    health, connector = ("/".join(reading.outbox.key(name).path) for name in ("health", "connector"))
    problems = [
        *of_results(settings, [result for result in results if result.rule.name not in OF_CONNECTOR], health),
        *of_results(settings, [result for result in results if result.rule.name in OF_CONNECTOR], connector),
    ]
    return problems, relayed


def _of_the_instance(context: dg.SensorEvaluationContext, outbox: Outbox, now: float) -> list["Problem"]:
    from outbox_pipelines.quality.alerts import Problem

    clash = places.clash(context, outbox, now)
    return [Problem("code locations", clash, "see the sensor `health`")] if clash else []


def _of_a_run(settings: "Settings", what: str, failure: dict[str, Any]) -> "Problem":
    from outbox_pipelines.quality.alerts import Problem

    page = f"{settings.ui_url.rstrip('/')}/runs/{failure['run']}"
    where = page if settings.ui_url else f"run {failure['run'][:8]} in Dagster"
    return Problem(what, failure["why"], where)


def _failures(
    context: dg.SensorEvaluationContext, outbox: Outbox, kept: dict[str, Any], now: float
) -> tuple[dict[str, Any], set[str]]:
    """Return the unresolved failures of runs and checks by subject, and the subjects that are too old.

    Args:
        kept: the sensor's cursor; advanced past the runs that were read.
    """
    for what, run in _ended_runs(context, outbox, kept):
        if run is None:
            kept["runs"].pop(what, None)
        else:
            kept["runs"][what] = {"at": now, **run}
    found = kept["runs"] | dict(_failed_checks(context, outbox, since=kept["begun"]))
    forgotten = {what for what, one in found.items() if now - one["at"] >= _FORGET_SECONDS}
    for what in forgotten:
        kept["runs"].pop(what, None)
    return {what: one for what, one in found.items() if what not in forgotten}, forgotten


def _ended_runs(
    context: dg.SensorEvaluationContext, outbox: Outbox, kept: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield the subject of each run that has ended since the last tick, and its failure if it failed."""
    records = context.instance.get_run_records(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE],
            updated_after=datetime.fromtimestamp(kept["after"], UTC),
        ),
        limit=_AT_ONCE,
        order_by="update_timestamp",
        ascending=True,
    )
    for record in records:
        run = record.dagster_run
        kept["after"] = max(kept["after"], record.update_timestamp.timestamp())
        if _is_ours(context, outbox, run):
            is_failed = run.status is dg.DagsterRunStatus.FAILURE
            failure = {"run": run.run_id, "why": _why(context.instance, run.run_id), "shard": _shard(run)}
            yield _what(run), failure if is_failed else None


def _failed_checks(
    context: dg.SensorEvaluationContext, outbox: Outbox, since: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the checks whose newest result of a day is an error, except those of `outbox/health`."""
    from outbox_pipelines.defs.dagster_internals import completed_results

    graph = context.repository_def.asset_graph if context.repository_def else None
    for key in graph.asset_check_keys if graph else ():
        if key not in runs.checks(outbox) or key.asset_key == outbox.key("health"):
            continue
        seen = set()
        for record in completed_results(context.instance, key, _AT_ONCE):
            if record.partition in seen:
                continue
            seen.add(record.partition)
            verdict, event = record.evaluation, record.event
            assert verdict is not None
            assert event is not None
            is_error = not verdict.passed and verdict.severity is dg.AssetCheckSeverity.ERROR
            if is_error and event.timestamp >= since:
                what = " ".join(filter(None, ["check", key.name, record.partition]))
                why = verdict.description or "see the check's metadata"
                yield what, {"run": record.run_id, "why": why, "at": event.timestamp}


def _is_ours(context: dg.SensorEvaluationContext, outbox: Outbox, run: dg.DagsterRun) -> bool:
    """Return whether the run is of a job or an asset of the outbox, in this code location."""
    # A run of the user's that also has assets of the outbox fails for both.
    is_of_outbox = runs.is_ours(outbox, run) or bool(runs.assets(outbox) & (run.asset_selection or set()))
    return is_of_outbox and places.is_here(context, run)


def _what(run: dg.DagsterRun) -> str:
    names = [key.to_user_string() for key in sorted(run.asset_selection or ())]
    job = ", ".join(names) if run.job_name.startswith("__") and names else run.job_name
    shard = _shard(run)
    of = [] if shard is None else [f"shard {shard}"]
    return " ".join([f"failed run of {job}", *of, *([run.tags[DAY]] if DAY in run.tags else [])])


def _shard(run: dg.DagsterRun) -> str | None:
    return run.tags[places.SHARD].rpartition(":")[2] if places.SHARD in run.tags else None


def _why(instance: dg.DagsterInstance, run_id: str) -> str:
    """Return why a run failed, in one line."""
    from outbox_pipelines.defs.dagster_internals import events_of

    for entry in events_of(instance, run_id, {dg.DagsterEventType.STEP_FAILURE}):
        assert entry.dagster_event is not None
        data = entry.dagster_event.step_failure_data
        if data.user_failure_data and data.user_failure_data.description:
            return data.user_failure_data.description
        if data.error:
            return data.error.message.strip().splitlines()[0]
    # A killed process logs nothing. Use the message of its monitor, or the run's failure event.
    said = ""
    watched = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.RUN_FAILURE}
    for entry in events_of(instance, run_id, watched):
        line = _line(entry.dagster_event)
        is_end = entry.dagster_event_type is dg.DagsterEventType.RUN_FAILURE
        if _KILLED.search(line) or (is_end and not line.startswith(_OUTSIDE)):
            said = line
    return said or "the run ended without an error message: see its log"


def _line(event: dg.DagsterEvent | None) -> str:
    lines = (event.message or "").strip().splitlines() if event else []
    return lines[0] if lines else ""
