"""The sensor that tells people: what the checks find, and runs that fail."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from outbox_pipelines.defs.resources import OutboxResource

if TYPE_CHECKING:
    from outbox_pipelines.quality.alerts import Known, Problem
    from outbox_pipelines.settings import Settings

_DAY = "dagster/partition"
_SHARD = "outbox/shard"
_RUNS_A_TICK = 500
# A run that failed and was never run again is forgotten then.
_FORGET_SECONDS = 7 * 86_400.0


@dg.sensor(
    name="alerts",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="""Tells people (OUTBOX_ALERTS) of every check of `outbox/health` that fails, of a database
that is away, and of runs that fail: one message when it begins, and one when it is over.

Use: set OUTBOX_ALERTS to addresses of apprise (mail, Slack, webhooks, …), OUTBOX_UI_URL to the address of
these pages, and try it with `outbox alerts test`. Without OUTBOX_ALERTS it does nothing. Warnings are not
sent. A problem is told when it has lasted for OUTBOX_ALERT_AFTER_SECONDS; restarts do not tell it again. A
run that failed is over when one of the same job and day, or shard, succeeds.

When a tick fails: no address took the message, or a setting is wrong; the next tick tries again. Prometheus
has the same rules (deploy/prometheus), and also tells when Dagster itself is down.
""",
)
def alerts_sensor(
    context: dg.SensorEvaluationContext, outbox: OutboxResource
) -> dg.SensorResult | dg.SkipReason:
    # Here, because definitions are to load without the drivers.
    from outbox_pipelines.errors import SetupError
    from outbox_pipelines.quality import alerts

    settings = outbox.settings()
    if not settings.alerts:
        return dg.SkipReason("nobody is to be told: set OUTBOX_ALERTS")
    now = time.time()
    kept: dict[str, Any] = (
        json.loads(context.cursor) if context.cursor else {"known": {}, "runs": {}, "after": now}
    )
    runs, after = _failed_runs(context, kept["runs"], kept["after"], now)
    known = alerts.from_json(kept["known"])
    messages, known = alerts.news(
        known,
        [*_of_the_outbox(settings, known), *(_of_a_run(settings, run) for run in runs.values())],
        now=now,
        after=settings.alert_after_seconds,
        where=alerts.where(settings),
    )
    if messages:
        failed = alerts.send(settings, messages)
        for shown in failed:
            context.log.warning(f"{shown} did not take the message")
        if len(failed) == alerts.addresses(settings):
            raise SetupError(
                f"no address of OUTBOX_ALERTS took: {'; '.join(each.title for each in messages)}"
            )
    told = [key for key, one in known.items() if one.told]
    return dg.SensorResult(
        skip_reason=dg.SkipReason(
            f"told and not over: {', '.join(told)}" if told else "there is nothing to tell"
        ),
        cursor=json.dumps({"known": alerts.to_json(known), "runs": runs, "after": after}),
    )


def _of_the_outbox(settings: "Settings", known: Mapping[str, "Known"]) -> list["Problem"]:
    import psycopg

    from outbox_pipelines.database import first_line
    from outbox_pipelines.errors import SetupError
    from outbox_pipelines.quality import measurements
    from outbox_pipelines.quality.alerts import Problem, of_verdicts
    from outbox_pipelines.quality.rules import RULES, judge

    # What cannot be measured is not over.
    unseen = [Problem(rule.name, known[rule.name].text, rule.help) for rule in RULES if rule.name in known]
    remedy = "`outbox status` says it again; nothing is relayed meanwhile (docs/operating.md#database)"
    try:
        return of_verdicts(settings, judge(settings, measurements.read(settings)))
    except SetupError as error:
        return [Problem("database", str(error), remedy), *unseen]
    except psycopg.Error as error:
        return [Problem("database", f"the database refuses: {first_line(error)}", remedy), *unseen]


def _of_a_run(settings: "Settings", run: dict[str, Any]) -> "Problem":
    from outbox_pipelines.quality.alerts import Problem

    page = (
        f"{settings.ui_url.rstrip('/')}/runs/{run['id']}"
        if settings.ui_url
        else f"run {run['id'][:8]} in Dagster"
    )
    return Problem(run["what"], run["why"], page)


def _failed_runs(
    context: dg.SensorEvaluationContext, failed: dict[str, Any], after: float, now: float
) -> tuple[dict[str, Any], float]:
    """The runs that failed and were not made good, by what they are of; and up to when that is known."""
    records = context.instance.get_run_records(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE],
            updated_after=datetime.fromtimestamp(after, UTC),
        ),
        limit=_RUNS_A_TICK,
        order_by="update_timestamp",
        ascending=True,
    )
    found = {what: run for what, run in failed.items() if now - run["at"] < _FORGET_SECONDS}
    for record in records:
        run = record.dagster_run
        after = max(after, record.update_timestamp.timestamp())
        if not _is_ours(context, run):
            continue
        what = _what(run)
        if run.status is dg.DagsterRunStatus.SUCCESS:
            found.pop(what, None)
        else:
            found[what] = {
                "id": run.run_id,
                "what": what,
                "why": _why(context.instance, run.run_id),
                "at": now,
            }
    return found, after


def _is_ours(context: dg.SensorEvaluationContext, run: dg.DagsterRun) -> bool:
    """Whether it is of this code location; runs of assets chosen by hand have one name in all of them."""
    if run.asset_selection:
        return any(key.path[0] == "outbox" for key in run.asset_selection)
    repository = context.repository_def
    return repository is None or run.job_name in repository.job_names


def _what(run: dg.DagsterRun) -> str:
    names = [key.to_user_string() for key in sorted(run.asset_selection or ())]
    job = ", ".join(names) if run.job_name.startswith("__") and names else run.job_name
    of = [f"shard {run.tags[_SHARD]}"] if _SHARD in run.tags else []
    return " ".join([f"failed run of {job}", *of, *([run.tags[_DAY]] if _DAY in run.tags else [])])


def _why(instance: dg.DagsterInstance, run_id: str) -> str:
    """In a line."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        assert entry.dagster_event is not None
        data = entry.dagster_event.step_failure_data
        if data.user_failure_data and data.user_failure_data.description:
            return data.user_failure_data.description
        if data.error:
            return data.error.message.strip().splitlines()[0]
    return "it ended without saying why: see its log"
