"""Reconciliation of a day with the topics and the consumers: the asset, its check, and the job."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.core.text import markdown, plain
from outbox_pipelines.defs import pages, places
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import day_of, one_line

if TYPE_CHECKING:
    from outbox_pipelines.reconciliation.report import Report

# Every process that loads the definitions would print it.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)

_CHECK = "nothing_is_lost"
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

Use: the job `reconcile_day` with a day, after an incident, or to prove that no event was lost.
`outbox reconcile DAY` reports the same on a command line, also for the current day so far. Choose days that
the topics still keep.

When it fails: the error says in one line which database or topic is unavailable, or which setting is wrong.
Differences fail the check, not the run.
"""


def reconciliation(outbox: Outbox) -> dg.AssetsDefinition:
    """Return the asset `reconciliation`."""

    @dg.asset(
        key=outbox.key("reconciliation"),
        partitions_def=outbox.days,
        deps=[outbox.key("events"), outbox.key("relay")],
        group_name=outbox.asset_group,
        tags=outbox.asset_tags,
        pool=outbox.pool,
        owners=outbox.owners,
        kinds={"kafka", "duckdb"},
        check_specs=[
            # In the same step: the asset's counts give the check's result.
            dg.AssetCheckSpec(
                _CHECK,
                asset=outbox.key("reconciliation"),
                partitions_def=outbox.days,
                description=outbox.text(_NOTHING_IS_LOST),
            )
        ],
        description=outbox.text(_ASSET),
    )
    def reconciliation(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
        with one_line(outbox):
            from outbox_pipelines.quality.rules import Status
            from outbox_pipelines.reconciliation import reconcile as days

            report = days.reconcile(
                outbox.load_settings(), day_of(context), progress=lambda line: context.log.info(plain(line))
            )
        for line in report.lines():
            context.log.info(plain(line))
        is_error = report.status is Status.ERROR
        yield dg.MaterializeResult(
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

    return reconciliation


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
topics still have all events. 10 million events take some minutes of one core, and 750 MB of memory.

When it fails: the run says in one line what is unavailable, or what to set; run it again. When the check
fails, its metadata names the events and says what to do.
"""


def reconcile_day(outbox: Outbox) -> Any:
    """Return the job `reconcile_day`."""
    selection = dg.AssetSelection.assets(outbox.key("reconciliation"))
    return outbox.asset_job("reconcile_day", _RECONCILE_DAY, selection)
