"""Reconciliation of a day with the topics and the consumers: the asset, its check, and the job."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.core.text import markdown, plain
from outbox_pipelines.defs import pages, places, storage
from outbox_pipelines.defs.jobs import asset_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import day_of, one_line

if TYPE_CHECKING:
    from outbox_pipelines.reconciliation.exchange import Exchange
    from outbox_pipelines.reconciliation.report import Report
    from outbox_pipelines.settings import Settings

    _Step = tuple[Settings, Exchange, Callable[[str], None]]

# Every process that loads the definitions would print it.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)

_CHECK = "nothing_is_lost"
_UPSTREAM: Final = ("events", "relay")
# A slice is a part of the work: the other slices do not run again.
_AGAIN: Final = dg.RetryPolicy(max_retries=2, delay=10)
_NOTHING_IS_LOST: Final = """\
Whether the topics and every configured consumer have all events of the day.

Errors: missing events, messages without an event (phantoms), events behind later ones of their
aggregate. Warnings: duplicates, lagging events, a consumer's dead letters, and events that cannot be compared
because a topic or a table no longer keeps them. The metadata has the counts, and ten examples of each with
id, seq and place. Each day has its own result.

When it fails: the metadata says what to do about each finding; docs/reconciliation.md has a chapter for each
kind. Lagging events disappear from the report when you run the job `reconcile_day` again later.
"""
_ASSET: Final = """\
Compares each day's events with the messages of their topics, and with the events that each
consumer of `[consumers.NAME]` in outbox.toml has handled. The check `nothing_is_lost` reports the result.

A partition is a UTC day, in the table or in the archive. Only ids and places are read, and compared on disk,
with a fixed amount of memory. Nothing is changed, and consumers are not affected: no offset is committed, no
group joined.

Use: the job `reconcile_day` with a day, after an incident, or to prove that no event was lost. For a day of
many million events, set `slices` in the run's configuration: the job's executor distributes them.
`outbox reconcile DAY` reports the same on a command line, also for the current day so far. Choose days that
the topics still keep.

When it fails: the error says in one line which database or topic is unavailable, or which setting is wrong. A
slice that fails is tried again alone. Differences fail the check, not the run.
"""

_SLICES: Final = """\
Parts of the day that are compared in steps of their own, which the job's executor distributes. With the
default 1, one step compares the whole day. Otherwise steps pass on their rows in OUTBOX_ARCHIVE, which all of
them must reach.
"""


def reconciliation(outbox: Outbox) -> dg.AssetsDefinition:
    """Return the asset `reconciliation`."""
    key = outbox.key("reconciliation")
    is_lost = dg.AssetCheckSpec(
        _CHECK, asset=key, partitions_def=outbox.days, description=outbox.text(_NOTHING_IS_LOST)
    )
    begin, read, divide, compare, order, report = _ops(outbox)
    aggregates = outbox.name_of("reconcile_aggregates")

    @dg.graph_asset(
        key=key,
        ins={name: dg.AssetIn(outbox.key(name), dagster_type=dg.Nothing) for name in _UPSTREAM},
        partitions_def=outbox.days,
        group_name=outbox.asset_group,
        tags=outbox.asset_tags,
        owners=list(outbox.owners),
        kinds={"kafka", "duckdb"},
        check_specs=[is_lost],
        config=dg.ConfigMapping(
            config_schema={
                "slices": dg.Field(int, default_value=1, is_required=False, description=outbox.text(_SLICES))
            },
            config_fn=lambda given: {
                name: {"config": given} for name in (begin.name, divide.name, aggregates, report.name)
            },
        ),
        description=outbox.text(_ASSET),
    )
    def reconciliation(events: Any, relay: Any) -> Any:
        rows = begin(events=events, relay=relay).map(lambda each: read(before=each)).collect()
        compared = divide(before=rows).map(lambda each: compare(before=each)).collect()
        ordered = divide.alias(aggregates)(before=compared).map(lambda each: order(before=each)).collect()
        result, check = report(before=ordered)
        return {"result": result, is_lost.get_python_identifier(): check}

    return reconciliation


def _ops(outbox: Outbox) -> tuple[dg.OpDefinition, ...]:
    """Return the ops of the asset, in order.

    Each passes on its rows in the archive: Dagster's outputs, and a user's I/O manager, have none of them.
    Without slices the last one does everything, and the others nothing.
    """
    one: Any = dg.Out(dg.Nothing, io_manager_key=storage.KEY)
    many = dg.DynamicOut(dg.Nothing, io_manager_key=storage.KEY)
    before: Any = {"before": dg.In(dg.Nothing)}
    config = {"slices": int}

    def op(name: str, **options: Any) -> Callable[[Callable[..., Any]], dg.OpDefinition]:
        return dg.op(name=outbox.name_of(f"reconcile_{name}"), pool=outbox.pool, **options)

    @contextmanager
    def step(context: dg.OpExecutionContext) -> "Iterator[_Step]":
        with one_line(outbox):
            from outbox_pipelines.reconciliation import exchange

            settings = outbox.load_settings()
            # Of the first run, so that one that continues it finds its rows.
            name = f"{day_of(context)}-{context.run.root_run_id or context.run.run_id}"
            with exchange.shared(settings, name) as rows:
                yield settings, rows, lambda line: context.log.info(plain(line))

    @op("events", ins={name: dg.In(dg.Nothing) for name in _UPSTREAM}, config_schema=config, out=many)
    def begin(context: dg.OpExecutionContext) -> Iterator[dg.DynamicOutput[None]]:
        slices = context.op_config["slices"]
        if slices == 1:
            return
        with step(context) as (settings, rows, progress):
            from outbox_pipelines.reconciliation import steps

            of = steps.begin(settings, day_of(context), (), slices, rows, progress)
        for reader in of.readers:
            yield dg.DynamicOutput(None, mapping_key=reader)

    @op("read", ins=before, out=one, retry_policy=_AGAIN)
    def read(context: dg.OpExecutionContext) -> None:
        with step(context) as (settings, rows, progress):
            from outbox_pipelines.reconciliation import steps

            steps.read(settings, str(context.get_mapping_key()), rows, progress)

    @op("slices", ins=before, config_schema=config, out=many)
    def divide(context: dg.OpExecutionContext) -> Iterator[dg.DynamicOutput[None]]:
        slices = context.op_config["slices"]
        for number in range(slices if slices > 1 else 0):
            yield dg.DynamicOutput(None, mapping_key=str(number))

    @op("compare", ins=before, out=one, retry_policy=_AGAIN)
    def compare(context: dg.OpExecutionContext) -> None:
        with step(context) as (settings, rows, progress):
            from outbox_pipelines.reconciliation import steps

            steps.compare(settings, int(context.get_mapping_key() or 0), rows, progress)

    @op("order", ins=before, out=one, retry_policy=_AGAIN)
    def order(context: dg.OpExecutionContext) -> None:
        with step(context) as (_, rows, _):
            from outbox_pipelines.reconciliation import steps

            steps.order(int(context.get_mapping_key() or 0), rows)

    @op("report", ins=before, config_schema=config, out={"result": one, "check": one})
    def report(context: dg.OpExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        if context.op_config["slices"] == 1:
            with one_line(outbox):
                from outbox_pipelines.reconciliation import steps as days

                found = days.reconcile(
                    outbox.load_settings(),
                    day_of(context),
                    progress=lambda line: context.log.info(plain(line)),
                )
        else:
            with step(context) as (settings, rows, _):
                from outbox_pipelines.reconciliation import steps

                found = steps.merge(settings, rows)
                rows.remove()
        yield _result(context, outbox, found)

    return begin, read, divide, compare, order, report


def _result(context: dg.OpExecutionContext, outbox: Outbox, report: "Report") -> dg.MaterializeResult[Any]:
    from outbox_pipelines.quality.rules import Status

    for line in report.lines():
        context.log.info(plain(line))
    is_error = report.status is Status.ERROR
    return dg.MaterializeResult(
        metadata={
            "events": report.events,
            "messages": report.messages,
            "read_from": report.source,
            "seconds": report.seconds,
        },
        check_results=[
            dg.AssetCheckResult(
                check_name=_CHECK,
                passed=report.equal,
                severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
                description=markdown(report.summary),
                metadata=_metadata(report) | places.mark(context, outbox),
            )
        ],
    )


def _metadata(report: "Report") -> dict[str, Any]:
    """Return each count as a number, and the output of the command."""
    counts = {
        f"{side.name}: {found.kind.name}": found.count for side in report.sides for found in side.findings
    }
    compared = {f"{side.name}: compared": side.compared for side in report.sides}
    return {**compared, **counts, "report": pages.report(report.lines())}


_RECONCILE_DAY: Final = """\
Reconciles a day: the asset `outbox/reconciliation`, and its check `nothing_is_lost`.

Use: choose a day, or a range of days as a backfill. Run it on the next day: consumers have caught up, and the
topics still have all events. 10 million events take some minutes of one core, and 750 MB of memory. To
divide a larger day, set `slices` of `outbox/reconciliation` in the configuration.

When it fails: the run says in one line what is unavailable, or what to set; run it again. When the check
fails, its metadata names the events and says what to do.
"""


def reconcile_day(outbox: Outbox) -> Any:
    """Return the job `reconcile_day`."""
    selection = dg.AssetSelection.assets(outbox.key("reconciliation"))
    return asset_job(outbox, "reconcile_day", _RECONCILE_DAY, selection)
