"""Closed days as Parquet files: the asset, the check that proves them, the job and its schedule."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time
from typing import Any

import dagster as dg

from outbox_pipelines.defs import ours, places
from outbox_pipelines.defs.day_quality import events_as_expected
from outbox_pipelines.defs.events import DAYS, OWNERS, events
from outbox_pipelines.defs.failures import day_of, one_line
from outbox_pipelines.defs.resources import OutboxResource
from outbox_pipelines.defs.runs import requests


@dg.asset(
    key=["outbox", "archive"],
    partitions_def=DAYS,
    deps=[events],
    group_name="outbox",
    owners=OWNERS,
    kinds={"parquet"},
    description="""A Parquet file for each day that is over, in the directory or bucket of OUTBOX_ARCHIVE.

A partition is a UTC day. It is closed first, if it can be; then its rows are written with what became of
them, and a manifest with counts and digests beside the file. A day that is archived already is left as it is.

Use: let the schedule `archive_days` do it. By hand: the job `archive_day` for a day, or choose days under
Materialize: each gets a run of its own.

When it fails: the error says in one line why the day is not ready, and what helps, or what the archive or the
database refuses. Nothing that counts was written: run it again. To replace a file that is there, use
`outbox archive day DAY --again` on a command line.
""",
)
def archive(context: dg.AssetExecutionContext, outbox_pipelines: OutboxResource) -> dg.MaterializeResult[Any]:
    started = time.monotonic()
    with one_line():
        # Here, because definitions are to load without the drivers.
        from outbox_pipelines.archive import day as days

        done = days.archive(
            outbox_pipelines.settings(),
            day_of(context),
            progress=lambda rows: context.log.info(f"{rows:,} rows written"),
        )
    manifest = done.manifest
    if not done.written:
        context.log.info(f"{manifest.day} was archived before: it is left as it is")
    return dg.MaterializeResult(
        metadata={
            "rows": manifest.rows,
            "megabytes": round(manifest.size / 1e6, 3),
            "file": dg.MetadataValue.path(done.address),
            "seconds": round(time.monotonic() - started, 3),
            "archived_before": not done.written,
        }
    )


@dg.asset_check(
    asset=archive,
    name="archive_equals_table",
    partitions_def=DAYS,
    description="""Whether the file of a day and its rows in the table are equal, value by value.

PostgreSQL sums the rows, DuckDB the file as it lies in the archive; both must agree, and with the manifest,
whose digest the database keeps. Of a dropped day the file is compared with its manifest. Each day has a
verdict of its own: a later day's success hides no failure.

When it fails: its metadata names the buckets and the events that differ. While the rows are there,
`outbox archive day DAY --again` writes the file anew; find out first who has changed what. A day that is
not proven equal is never dropped.
""",
)
def archive_equals_table(
    context: dg.AssetCheckExecutionContext, outbox_pipelines: OutboxResource
) -> dg.AssetCheckResult:
    started = time.monotonic()
    day = day_of(context)
    with one_line():
        from outbox_pipelines.archive import day as days

        proof = days.verify(outbox_pipelines.settings(), day)
    for difference in proof.differences:
        context.log.error(f"{day}: {difference}")
    return dg.AssetCheckResult(
        passed=proof.equal,
        severity=dg.AssetCheckSeverity.ERROR,
        description=proof.differences[0] if proof.differences else f"{proof.rows:,} rows proven equal",
        metadata={
            "rows": proof.rows,
            "differences": dg.MetadataValue.md("\n".join(f"- {line}" for line in proof.differences)),
            "seconds": round(time.monotonic() - started, 3),
            **places.mark(context),
        },
    )


archive_day = dg.define_asset_job(
    "archive_day",
    selection=dg.AssetSelection.assets(archive) | dg.AssetSelection.checks(events_as_expected),
    tags=ours.TAGS,
    executor_def=ours.EXECUTOR,
    description="""Archives a day and proves it: the asset `outbox/archive`, then its check. Before, the check
`events_as_expected` of `outbox/events` looks at the day's rows; what it finds holds nothing up.

Use: the schedule `archive_days` launches it for each day that is closed. By hand: choose a day or
a range of days in the launchpad; each gets a run. Safe for a day that is archived already.

When it fails: the run says in one line what stands against it and what helps; run it again afterwards. When
the check fails, its metadata names the events that differ: see there.
""",
)


@dg.schedule(
    name="archive_days",
    job=archive_day,
    # Off the full hour, when everybody's jobs start.
    cron_schedule="37 * * * *",
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description="""Launches `archive_day` for each day that is closed and not archived, every hour.

Use: leave it on; without OUTBOX_ARCHIVE it does nothing. A day that fails is tried again an hour later, and
never while a run of it is still at work.

When a tick fails: its error says in one line what to mend (settings, database, schema). Nothing is lost: days
stay in the table until they are archived.
""",
)
def archive_days(
    context: dg.ScheduleEvaluationContext, outbox_pipelines: OutboxResource
) -> list[dg.RunRequest] | dg.SkipReason:
    """A tick. `SetupError` is left to fail it, as in `relay_supervisor`."""
    from outbox_pipelines.partitions import calendar

    settings = outbox_pipelines.settings()
    if not settings.archives:
        return dg.SkipReason("no archive is named: set OUTBOX_ARCHIVE to have closed days archived")
    return requests(context, calendar.waiting(settings), nothing="every day that is closed is archived")
