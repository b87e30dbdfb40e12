"""Closed days as Parquet files: the asset, its check, job and schedule, and the resource for others.

Invariants:
- The cost of a day's metadata is bounded: pictures are of at most 30 days, of fewer if their files are large.
- Names of events are in tables and pictures, where they are escaped; none is Markdown.
"""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
from base64 import b64encode
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import dagster as dg
from pydantic import Field

from outbox_pipelines.core.text import counted, markdown, plain
from outbox_pipelines.defs import pages, places, ticks
from outbox_pipelines.defs.jobs import asset_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import day_of, one_line
from outbox_pipelines.defs.runs import requests
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

    from outbox_pipelines.days.archive import Archive
    from outbox_pipelines.settings import Settings

_ARCHIVE: Final = """\
A Parquet file for each past day, in the directory or bucket of OUTBOX_ARCHIVE.

A partition is a UTC day. The day is closed first, if possible; then its rows are written with their outcome,
and a manifest with counts and digests next to the file. A day that is already archived is left unchanged.
The metadata has the day's numbers, which Dagster plots, its event types, and pictures of up to 30 days.

Use: let the schedule `archive_days` do it. By hand: the job `archive_day` for a day, or choose days under
Materialize: each gets its own run.

When it fails: the error says in one line why the day is not ready and what to do, or reports the error of the
archive or the database. No incomplete file counts as an archive: run the job again. To replace an existing
file, use `outbox archive day DAY --again` on a command line.
"""
_ARCHIVE_EQUALS_TABLE: Final = """\
Whether the file of a day and its rows in the table are equal, value by value.

PostgreSQL sums the rows, DuckDB sums the file in the archive; the sums must match each other and the
manifest, whose digest the database keeps. For a dropped day, the file is compared with its manifest. Each day
has its own result: the success of a later day hides no failure.

When it fails: the metadata names the buckets and the events that differ. Find out first who changed what.
If the rows are correct, `outbox archive day DAY --again` writes the file again. A day that is not proven
equal is never dropped.
"""
_ARCHIVE_DAY: Final = """\
Archives a day and checks it: the asset `outbox/archive`, then its checks. Whether the file equals the rows,
and what Great Expectations finds in the day's events. A failed check does not undo the archive.

Use: the schedule `archive_days` launches it for each closed day. By hand: choose a day or a range of days in
the launchpad; each gets its own run. Safe for a day that is already archived.

When it fails: the run says in one line what prevents it and what to do; run it again afterwards. When
the check fails, its metadata names the events that differ.
"""
_ARCHIVE_DAYS: Final = """\
Launches `archive_day` every hour for each day that is closed and not archived. Leave it on. A day that fails
is retried an hour later, and stays in the table until it is archived. A skipped tick says what to correct.
"""


def archive(outbox: Outbox) -> dg.AssetsDefinition:
    """Return the asset `archive`."""

    @dg.asset(
        key=outbox.key("archive"),
        partitions_def=outbox.days,
        deps=[outbox.key("events")],
        group_name=outbox.asset_group,
        tags=outbox.asset_tags,
        pool=outbox.pool,
        owners=outbox.owners,
        kinds={"parquet"},
        freshness_policy=outbox.freshness_policy,
        automation_condition=outbox.automation_condition,
        description=outbox.text(_ARCHIVE),
    )
    def archive(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        started = time.monotonic()
        with one_line(outbox):
            from outbox_pipelines.days.archive import day as days

            done = days.archive(
                outbox.load_settings(),
                day_of(context),
                progress=lambda rows: context.log.info(f"{counted(rows, 'row')} written"),
            )
        manifest = done.manifest
        if not done.written:
            context.log.info(f"{manifest.day} is already archived: left unchanged")
        try:
            shown = _metadata(outbox.load_settings(), manifest.day)
        except SetupError as error:
            # The day is archived all the same.
            context.log.warning(plain(f"no numbers of {manifest.day}: {error}"))
            shown = {}
        return dg.MaterializeResult(
            metadata={
                "rows": manifest.rows,
                "megabytes": round(manifest.size / 1e6, 3),
                **shown,
                "file": dg.MetadataValue.path(done.address),
                "seconds": round(time.monotonic() - started, 3),
                "archived_before": not done.written,
            }
        )

    return archive


def archive_equals_table(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return the check `archive_equals_table`."""

    @dg.asset_check(
        asset=outbox.key("archive"),
        name="archive_equals_table",
        partitions_def=outbox.days,
        blocking="archive_equals_table" in outbox.blocking_checks,
        description=outbox.text(_ARCHIVE_EQUALS_TABLE),
    )
    def archive_equals_table(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        started = time.monotonic()
        day = day_of(context)
        with one_line(outbox):
            from outbox_pipelines.days.archive import day as days

            proof = days.verify(outbox.load_settings(), day)
        for difference in proof.differences:
            context.log.error(plain(f"{day}: {difference}"))
        return dg.AssetCheckResult(
            passed=proof.equal,
            severity=dg.AssetCheckSeverity.ERROR,
            description=markdown((*proof.differences, f"{counted(proof.rows, 'row')} proven equal")[0]),
            metadata={
                "rows": proof.rows,
                "differences": pages.report(proof.differences),
                "seconds": round(time.monotonic() - started, 3),
                **places.mark(context, outbox),
            },
        )

    return archive_equals_table


def archive_day(outbox: Outbox) -> Any:
    """Return the job `archive_day`."""
    selection = dg.AssetSelection.assets(outbox.key("archive"))
    return asset_job(outbox, "archive_day", _ARCHIVE_DAY, selection)


def archive_days(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `archive_days`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        from outbox_pipelines.days.partitions import calendar

        if not settings.archives:
            return dg.SkipReason("no archive configured: set OUTBOX_ARCHIVE to archive closed days")
        return requests(context, outbox, calendar.waiting(settings), nothing="every closed day is archived")

    # Not on the hour, when many other jobs start.
    return ticks.schedule(
        outbox, "archive_days", "37 * * * *", _ARCHIVE_DAYS, one, job="archive_day", of_days=True
    )


class ArchiveResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The archived days of one outbox, read-only.

    Example:
        ```python
        @dg.asset(partitions_def=orders.days, deps=[orders.key("archive")])
        def revenue(context: dg.AssetExecutionContext, archive: ArchiveResource) -> None:
            placed = archive.dataframe(context.partition_key, event_type="order.placed", parse=True)
        ```
    """

    url: str = Field(description="The location of the archive, as in OUTBOX_ARCHIVE.")

    def open(self) -> "Archive":
        """Return the archive with all its days.

        Raises:
            SetupError: there is no archive, or it has no days.
            UnavailableError: the bucket does not answer.
        """
        from outbox_pipelines.days.archive import open_archive

        return open_archive(self.url)

    def dataframe(self, day: date | str, **options: Any) -> "pd.DataFrame":
        """Return the events of a day as a DataFrame.

        Args:
            day: a date, or the key of a partition.
            options: `columns`, `aggregate_type`, `aggregate_id`, `event_type` and `parse`, as in
                `Archive.dataframe`.

        Raises:
            SetupError: the day is not archived.
        """
        return self._having(day).dataframe(since=day, until=day, **options)

    def relation(self, day: date | str, **options: Any) -> "duckdb.DuckDBPyRelation":
        """Return the same as a DuckDB relation; nothing is read before rows are fetched."""
        return self._having(day).relation(since=day, until=day, **options)

    def _having(self, day: date | str) -> "Archive":
        from outbox_pipelines.errors import SetupError

        archive = self.open()
        if str(day) not in map(str, archive.days):
            raise SetupError(
                f"{day} is not in the archive {self.url}: materialize the partition of its asset first"
            )
        return archive


_DAYS: Final = 30
_BYTES: Final = 1_000_000_000
_TYPES: Final = 20


def _metadata(settings: "Settings", day: date) -> dict[str, Any]:
    """Return the metadata of an archived day: its numbers, which Dagster plots, its types, and pictures.

    Raises:
        SetupError: a file cannot be read.
        UnavailableError: the archive does not answer.
    """
    from outbox_pipelines.days.archive import report, report_page
    from outbox_pipelines.days.archive.store import named

    archive = report.opened(named(settings))
    found = report.read(archive, _first_pictured(archive, day), day)
    total = found.by_period.get(day, report.Figures())
    types = [(kind, each) for (period, kind), each in found.by_both.items() if period == day and kind]
    types.sort(key=lambda one: -one[1].events)
    lags = {"lag_median_seconds": total.lag_median, "lag_p99_seconds": total.lag_p99}
    pictures = [b64encode(each.encode()).decode() for each in report_page.pictures(found, are_images=True)]
    return {
        "payload_megabytes": round(total.payload_bytes / 1e6, 3),
        **{name: seconds for name, seconds in lags.items() if seconds is not None},
        "dead_letters": total.dead_letters,
        "discarded": total.discarded,
        "event_types": pages.table(
            [
                {
                    "event_type": kind,
                    "events": each.events,
                    "bytes": each.payload_bytes,
                    "dead_letters": each.dead_letters,
                }
                for kind, each in types[:_TYPES]
            ],
            *("event_type", "events", "bytes", "dead_letters"),
        ),
        "pictures": dg.MetadataValue.md(
            "\n\n".join(f"![of the last days](data:image/svg+xml;base64,{picture})" for picture in pictures)
        ),
    }


def _first_pictured(archive: "Archive", day: date) -> date:
    """Return the first day of the pictures."""
    first, size = day, 0
    for each in reversed([each for each in archive.manifests if day - timedelta(_DAYS) < each < day]):
        size += archive.manifests[each].size
        if size > _BYTES:
            break
        first = each
    return first
