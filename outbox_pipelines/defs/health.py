"""The health of the outbox, and of Debezium's connector: assets, a check for each rule, sensor and job."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import json
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Final, cast

import dagster as dg

from outbox_pipelines.core.text import markdown, plain
from outbox_pipelines.defs import pages, places, ticks
from outbox_pipelines.defs.jobs import asset_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line, said
from outbox_pipelines.defs.ticks import HOUR, Reported
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import OF_CONNECTOR, OF_TABLES, RULES, Rule, Status, judge
from outbox_pipelines.relay import kinds

if TYPE_CHECKING:
    from outbox_pipelines.debezium.connector_state import Connector
    from outbox_pipelines.quality.measurements import Measurements
    from outbox_pipelines.quality.rules import CheckResult

_DATABASE = "database"

# Every process that loads the definitions would print it.
warnings.filterwarnings(
    "ignore", "Function `multi_observable_source_asset` is currently in beta", dg.BetaWarning
)

_HEALTH: Final = """\
The health of the outbox: backlog, lag, parked events, dead letters, days, Kafka.

The sensor `health` measures twice a minute and reports the checks here: a change for the worse at once, one
for the better too, unless there were ten changes within an hour; a failing check again while its numbers
change (after a minute, two minutes, four, up to an hour), all others once a day; its numbers, as plots, every
hour and with each change. `outbox status` shows the same on a command line.

Use: look at the Checks; Observe measures now, and the job `check_health` runs all checks now. When a check
fails: its description says what it means and what to do, and `runbook` in the metadata of the result is the
chapter about it, or a link to it if OUTBOX_RUNBOOK_URL is set.
OUTBOX_WARN_AT and OUTBOX_ERROR_AT change the limits.
"""
_DATABASE_ANSWERS: Final = """\
Whether the database is available and has an outbox of this version.

Without the database nothing is relayed, and the other checks keep their last results.

When it fails: its text says in one line what is wrong. The database is unavailable, refuses the credentials
of OUTBOX_DSN, or has no outbox (`outbox migrate`); a setting is wrong; or another code location of this
Dagster instance has an outbox of the same name. More: `runbook` in the metadata of the result.
"""
_CHECK_HEALTH: Final = """\
Measures the outbox now, and reports every check of `outbox/health`.

Use: by hand, after a correction, to see all results at once; the sensor `health` reports them within half a
minute, without a run, except `last_hour`, for which the schedule launches this job every hour. A failed check
does not fail the run.

When it fails: the run says in one line what to correct.
"""
_EXCEPT: Final = ", except `last_hour`, for which the schedule launches this job every hour"
_CHECK_HEALTH_SCHEDULE: Final = """\
Runs the job `check_health` every hour, for the check `last_hour`. Leave it on.
"""
_LAST_HOUR: Final = """\
Whether events were published in time during the last hour, and without failures.

Great Expectations judges what relays recorded every second: the median, the 95th percentile and the maximum
of the latency, dead letters, and events that were published only after a rejection. The checks `lag` and
`dead_letters` judge the present state; this one also finds an outage that is over.

When it fails: nothing is lost. The metadata has each expectation; `outbox quality hour` prints the same.
"""
_HEALTH_SENSOR: Final = """\
Measures the outbox with one statement, and reports the checks of `outbox/health`, without a run. Leave it on.
Ticks are skipped, with their findings; what to do is in the description of each check.
"""
_NAMES: Final = {*(rule.name for rule in RULES), _DATABASE}


def health(outbox: Outbox) -> dg.AssetsDefinition:
    """Return the asset `health`, which measures when it is observed."""
    key = outbox.key("health")
    spec = outbox.spec("health", _HEALTH, {"postgres"})

    @dg.multi_observable_source_asset(  # type: ignore[untyped-decorator]
        name=outbox.name_of("measure"), specs=[spec]
    )
    def health() -> Iterator[dg.ObserveResult]:
        with one_line(outbox):
            settings = outbox.load_settings()
            found = kinds.of(settings).measure(settings)
        yield dg.ObserveResult(asset_key=key, metadata=_numbers(found))

    return cast(dg.AssetsDefinition, health)


def description(rule: Rule) -> str:
    """Return what a check says about itself."""

    def limit(value: float | None) -> str:
        return "never" if value is None else f"{'below' if rule.is_least else 'at'} {rule.show(value)}"

    return f"""{rule.why}

Warns {limit(rule.warn)}, fails {limit(rule.error)}, unless OUTBOX_WARN_AT or OUTBOX_ERROR_AT overrides it.

When it fails: {rule.help}. More: `runbook` in the metadata of the result.
"""


def checks(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return a check for each rule, and the check of the database."""
    texts = {
        rule.name: description(rule)
        for rule in RULES
        if rule.name not in OF_CONNECTOR
        if rule.name in OF_TABLES or not outbox.is_existing_table
    }
    return _checks(outbox, "health", texts | {_DATABASE: _DATABASE_ANSWERS})


def connector_checks(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return the checks of Debezium's connector."""
    texts = {rule.name: description(rule) for rule in RULES if rule.name in OF_CONNECTOR}
    return _checks(outbox, "connector", texts)


def _checks(outbox: Outbox, asset: str, texts: dict[str, str]) -> dg.AssetChecksDefinition:
    key = outbox.key(asset)

    @dg.multi_asset_check(
        specs=[
            dg.AssetCheckSpec(name, asset=key, description=outbox.text(text)) for name, text in texts.items()
        ],
        name=outbox.name_of(f"check_{asset}_now"),
        can_subset=True,
    )
    def checks(context: dg.AssetCheckExecutionContext) -> Iterable[dg.AssetCheckResult]:
        yield from evaluated(context, outbox)

    return checks


def evaluated(context: dg.AssetCheckExecutionContext, outbox: Outbox) -> Iterator[dg.AssetCheckResult]:
    """Measure, and yield the result of each check that is asked for."""
    wanted = {key.name for key in context.selected_asset_check_keys}
    _, evaluations = _evaluate(ticks.Reading(outbox))
    mark = places.mark(context, outbox)
    if places.OTHERS in mark:
        evaluations[_DATABASE] = _answers(mark[places.OTHERS])
    for name, result in evaluations.items():
        if name in wanted:
            context.log.info(f"{name}: {plain(result['description'])}")
            result["metadata"] |= mark
            yield dg.AssetCheckResult(check_name=name, asset_key=_asset(outbox, name), **result)


def _asset(outbox: Outbox, name: str) -> dg.AssetKey:
    """Return the asset that a check is of."""
    return outbox.key("connector" if name in OF_CONNECTOR else "health")


def last_hour(outbox: Outbox) -> dg.AssetChecksDefinition | None:
    """Return the check `last_hour`; None for an existing table, whose relays record no progress."""
    if outbox.is_existing_table:
        return None

    @dg.asset_check(asset=outbox.key("health"), name="last_hour", description=outbox.text(_LAST_HOUR))
    def last_hour(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        import psycopg

        from outbox_pipelines.quality.expectations import checkpoint, hour

        found: list[checkpoint.Finding] = []
        error = None
        try:
            settings = outbox.load_settings()
            found = hour.validate(settings)
        except (SetupError, psycopg.Error) as failure:
            # The check `database` is the one that an operator is notified of.
            error = said(outbox, failure)
        status = Status.WARN if error else checkpoint.worst(found)
        return dg.AssetCheckResult(
            passed=status is Status.OK,
            severity=_severity(status),
            description=markdown(error or checkpoint.summary(found)),
            metadata={
                "expectations": pages.table([each.row for each in found]),
                **places.mark(context, outbox),
            },
        )

    return last_hour


def check_health_schedule(outbox: Outbox) -> dg.ScheduleDefinition | None:
    """Return the schedule of the job `check_health`; None without the check `last_hour`."""
    if outbox.is_existing_table:
        return None
    return dg.ScheduleDefinition(**outbox.timing("check_health", "17 * * * *", _CHECK_HEALTH_SCHEDULE))


def check_health(outbox: Outbox) -> Any:
    """Return the job `check_health`."""
    assets = ["health", *(["connector"] if outbox.is_set("connect_url") else [])]
    selection = dg.AssetSelection.checks_for_assets(*map(outbox.key, assets))
    text = _CHECK_HEALTH.replace(_EXCEPT, "") if outbox.is_existing_table else _CHECK_HEALTH
    return asset_job(outbox, "check_health", text, selection)


def health_sensor(outboxes: Sequence[Outbox], jobs: Sequence[Any]) -> dg.SensorDefinition:
    """Return the sensor that reports the checks.

    Args:
        jobs: the job `check_health` of each outbox.
    """
    return ticks.sensor(
        outboxes,
        "health",
        _report,
        jobs=jobs,
        seconds=30,
        reads=lambda settings: True,
        description=_HEALTH_SENSOR,
    )


def _report(context: dg.SensorEvaluationContext, reading: ticks.Reading, cursor: str | None) -> ticks.Tick:
    outbox, now = reading.outbox, time.time()
    key = outbox.key("health")
    before: dict[str, Any] = json.loads(cursor) if cursor else {"checks": {}, "observed": 0.0}
    clash = places.clash(context, outbox, now)
    # Results of one outbox would replace those of the other; a failure applies to both.
    measurements, evaluations = (None, {_DATABASE: _answers(clash)}) if clash else _evaluate(reading)
    # Nothing is kept of a removed rule, and of a check that another outbox may have reported since.
    kept = {_DATABASE} if clash else _NAMES
    last = {name: Reported(*before["checks"].get(name, ()) if name in kept else ()) for name in _NAMES}
    results = {
        dg.AssetCheckKey(_asset(outbox, name), name): evaluation for name, evaluation in evaluations.items()
    }
    reported: list[Any] = [*ticks.due(context.instance, last, results, now)]
    observed = before["observed"]
    if measurements is not None and (reported or now - observed >= HOUR):
        reported.append(dg.AssetObservation(key, metadata=_numbers(measurements)))
        if measurements.connector is not None:
            seen = _numbers_of_connector(measurements.connector)
            reported.append(dg.AssetObservation(outbox.key("connector"), metadata=seen))
        observed = now
    wrong = {
        name: evaluation["description"]
        for name, evaluation in evaluations.items()
        if not evaluation["passed"]
    }
    return ticks.Tick(
        _in_short(wrong),
        json.dumps({"checks": {name: astuple(check) for name, check in last.items()}, "observed": observed}),
        events=reported,
        is_wrong=bool(wrong),
    )


def _in_short(wrong: dict[str, str]) -> str:
    """Return the failing checks; with its text if there is one."""
    if not wrong:
        return "all checks passed"
    if len(wrong) == 1:
        [(name, text)] = wrong.items()
        return ticks.short(f"{name}: {text}")
    return f"{len(wrong)} checks fail: {ticks.listed(list(wrong))}"


def _evaluate(reading: ticks.Reading) -> tuple["Measurements | None", dict[str, dict[str, Any]]]:
    """Return the measurements, and the arguments of an evaluation by the check's name."""
    import psycopg

    from outbox_pipelines.quality.rules import chapter, chapter_text

    settings, found = None, None
    try:
        settings = reading.settings()
        found = reading.measurements()
        results = judge(settings, found)
    except (SetupError, psycopg.Error) as error:
        evaluations = {_DATABASE: _answers(said(reading.outbox, error))}
    else:
        evaluations = {result.rule.name: _evaluation(result) for result in results}
        evaluations[_DATABASE] = _answers(None)
    for name, evaluation in evaluations.items():
        if settings is not None and settings.runbook_url:
            evaluation["metadata"]["runbook"] = dg.MetadataValue.url(chapter(settings, name))
        elif not evaluation["passed"] and (text := chapter_text(name)):
            evaluation["metadata"]["runbook"] = dg.MetadataValue.md(text)
    return found, evaluations


def _evaluation(result: "CheckResult") -> dict[str, Any]:
    help_needed = {"what_to_do": result.rule.help} if result.status else {}
    return {
        "passed": result.status is Status.OK,
        "severity": _severity(result.status),
        "description": markdown(result.text),
        "metadata": {"value": result.value, **help_needed},
    }


def _answers(error: str | None) -> dict[str, Any]:
    return {
        "passed": error is None,
        "severity": dg.AssetCheckSeverity.ERROR,
        "description": markdown(error or "the database is available"),
        "metadata": {},
    }


def _severity(status: Status) -> dg.AssetCheckSeverity:
    return dg.AssetCheckSeverity.WARN if status is Status.WARN else dg.AssetCheckSeverity.ERROR


def _numbers(measurements: "Measurements") -> dict[str, Any]:
    """Return the values to plot, under stable names, and a table for each nonempty list."""
    tables = {
        "dead_letters_by_reason": measurements.dead_letter_reasons,
        "parked_by_reason": measurements.parked_reasons,
        "delayed_by_reason": measurements.delayed_reasons,
    }
    return {
        "unpublished": measurements.unpublished,
        "oldest_unpublished_seconds": round(measurements.oldest_unpublished_seconds, 3),
        "events_per_second": round(measurements.events_per_second, 1),
        "parked": measurements.parked,
        "dead_letters": measurements.dead_letters,
        "delayed": measurements.delayed,
        "open_replays": len(measurements.replays),
        "days_late": max(
            measurements.days_late.to_close, measurements.days_late.to_archive, measurements.days_late.to_drop
        ),
        "megabytes": round(measurements.table_bytes / 1e6, 1),
        "idempotency_keys": measurements.idempotency_keys,
        **(
            {"replays": pages.report(replay.line for replay in measurements.replays)}
            if measurements.replays
            else {}
        ),
    } | {name: _table(reasons) for name, reasons in tables.items() if reasons}


def _table(reasons: dict[str, int]) -> dg.MetadataValue[Any]:
    return pages.table([{"events": count, "reason": reason} for reason, count in reasons.items()])


_CONNECTOR: Final = """\
Debezium's connector, which publishes the outbox from a Kafka Connect cluster (OUTBOX_CONNECT_URL) instead of
a relay.

The sensor `health` observes it: its state, its worker, and how much of the server's log, and for how long, it
has not confirmed. Its checks find a task that failed, and one that reports RUNNING and sends nothing.

Use: look at the Checks; Observe asks Kafka Connect and the database now.

When a check fails: `outbox debezium status` names each problem with its remedy; docs/operating.md, connector.
"""


def connector(outbox: Outbox) -> dg.AssetsDefinition:
    """Return the asset `connector`, which asks when it is observed."""
    key = outbox.key("connector")
    spec = outbox.spec("connector", _CONNECTOR, {"debezium", "kafka"})

    @dg.multi_observable_source_asset(  # type: ignore[untyped-decorator]
        name=outbox.name_of("ask_connector"), specs=[spec]
    )
    def connector() -> Iterator[dg.ObserveResult]:
        with one_line(outbox):
            from outbox_pipelines.debezium.connector_reading import read

            found = read(outbox.load_settings())
        yield dg.ObserveResult(asset_key=key, metadata=_numbers_of_connector(found))

    return cast(dg.AssetsDefinition, connector)


def _numbers_of_connector(found: "Connector") -> dict[str, Any]:
    """Return the values to show and to plot."""
    running = [task for task in found.tasks if task.state == "RUNNING"]
    return {
        "state": found.state or ("unknown" if found.error else "none"),
        "tasks_running": len(running),
        "worker": ", ".join(dict.fromkeys(task.worker for task in found.tasks)) or "none",
        "unconfirmed_bytes": found.unconfirmed_bytes or 0,
        "unconfirmed_seconds": round(found.waiting_seconds, 1),
        "retained_bytes": found.retained_bytes or 0,
    }
