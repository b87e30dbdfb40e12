"""Whether a day came to the topics and the consumers: the asset, its check, and the job."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from outbox_pipelines.defs import ours, places
from outbox_pipelines.defs.events import DAYS, OWNERS, events
from outbox_pipelines.defs.failures import day_of, one_line
from outbox_pipelines.defs.resources import OutboxResource

if TYPE_CHECKING:
    from outbox_pipelines.reconciliation.report import Report

# Every process that loads the definitions would print it.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)

_KEY = dg.AssetKey(["outbox", "reconciliation"])
_CHECK = "nothing_is_lost"


@dg.asset(
    key=_KEY,
    partitions_def=DAYS,
    deps=[events, dg.AssetKey(["outbox", "relay"])],
    group_name="outbox",
    owners=OWNERS,
    kinds={"kafka", "duckdb"},
    check_specs=[
        # In the same step: what is counted for the one is the verdict of the other.
        dg.AssetCheckSpec(
            _CHECK,
            asset=_KEY,
            partitions_def=DAYS,
            description="""Whether the topics and every named consumer have what was written on the day.

Errors: events that are missing, messages that no event has (phantoms), events behind later ones of their
aggregate. Warnings: duplicates, what lags, a consumer's dead letters, and what cannot be told because a topic
or a table keeps no more. The metadata has the counts, and ten examples of each with id, seq and place. Each
day has a verdict of its own.

When it fails: the metadata says what helps for each; docs/reconciliation.md has a chapter for each word. What
lags is gone when the job `reconcile_day` is run again later.
""",
        )
    ],
    description="""Each day's events beside the messages of their topics, and beside what each consumer that
OUTBOX_CONSUMERS_FILE names has handled. The check `nothing_is_lost` is the verdict.

A partition is a UTC day, in the table or in the archive. Only ids and places are read, and compared on disk,
within a fixed amount of memory. Nothing is changed, and no consumer notices: no offset is committed, no group
joined.

Use: the job `reconcile_day` with a day, after an incident, or when somebody asks whether anything was lost;
`outbox reconcile DAY` says the same on a command line, of today as well, as it stands. Choose days that the
topics still keep.

When it fails: the error says in one line which database, topic or setting does not answer. A difference is no
failure: see the check.
""",
)
def reconciliation(
    context: dg.AssetExecutionContext, outbox_pipelines: OutboxResource
) -> Iterator[dg.MaterializeResult[Any]]:
    with one_line():
        # Here, because definitions are to load without the drivers.
        from outbox_pipelines.quality.rules import State
        from outbox_pipelines.reconciliation import day as days

        report = days.reconcile(outbox_pipelines.settings(), day_of(context), progress=context.log.info)
    for line in report.lines():
        context.log.info(line)
    is_error = report.state is State.ERROR
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
                description=report.summary,
                metadata=_metadata(report) | places.mark(context),
            )
        ],
    )


def _metadata(report: "Report") -> dict[str, Any]:
    """The counts, as numbers of their own, and all that the command prints."""
    counts = {
        f"{side.name}: {found.kind.name}": found.count for side in report.sides for found in side.findings
    }
    compared = {f"{side.name}: compared": side.compared for side in report.sides}
    return {**compared, **counts, "report": dg.MetadataValue.md("\n".join(["```", *report.lines(), "```"]))}


reconcile_day = dg.define_asset_job(
    "reconcile_day",
    selection=dg.AssetSelection.assets(reconciliation),
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Reconciles a day: the asset `outbox/reconciliation`, and its check `nothing_is_lost`.

Use: choose a day, or a range of days as a backfill. The day after is a good time: consumers have caught up,
and the topics still have all. 10 million events take some minutes of one core, and 750 MB of memory.

When it fails: the run says in one line what does not answer, or what to set; run it again. When the check
fails, its metadata names the events, and says what helps.
""",
)
