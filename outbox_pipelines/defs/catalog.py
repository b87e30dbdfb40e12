"""The check that every event type is documented, its job and its schedule."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.core.text import counted, markdown
from outbox_pipelines.defs import pages, places, ticks
from outbox_pipelines.defs.jobs import asset_job
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line

if TYPE_CHECKING:
    from outbox_pipelines.catalog.comparison import Compared
    from outbox_pipelines.settings import Settings


_EVENT_TYPES_DOCUMENTED: Final = """\
Whether the event catalog (OUTBOX_CATALOG_FILE) documents every event type in the table.

The check warns if an event type is not documented, or is retired and still written, or in a version that is
not listed. It blocks no event. An active type that is never written is only named in the metadata. The check
reads every row once.

When it fails: the metadata lists the types with their counts and times. Document each in the event catalog,
or stop its writer; `outbox catalog check` shows the same on a command line.
"""


def event_types_documented(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return the check `event_types_documented`."""

    @dg.asset_check(
        asset=outbox.key("events"),
        name="event_types_documented",
        description=outbox.text(_EVENT_TYPES_DOCUMENTED),
    )
    def event_types_documented(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        with one_line(outbox):
            from outbox_pipelines.catalog.comparison import compare

            compared = compare(outbox.load_settings())
        wrong = [each for each in compared if each.is_wrong]
        never_seen = [each.event_type for each in compared if each.status == "never seen"]
        return dg.AssetCheckResult(
            passed=not wrong,
            severity=dg.AssetCheckSeverity.WARN,
            description=markdown(", ".join(f"{each.event_type} is {each.status}" for each in wrong))
            or f"{counted(len(compared) - len(never_seen), 'event type')}, all documented",
            metadata={
                "offending_types": len(wrong),
                "offending_events": sum(each.seen.events for each in wrong if each.seen),
                "never_seen": never_seen,
                "offending": _table(wrong),
                **places.mark(context, outbox),
            },
        )

    return event_types_documented


def _table(wrong: "list[Compared]") -> dg.TableMetadataValue:
    return pages.table(
        [
            {
                "event_type": each.event_type,
                "why": each.status,
                "events": each.seen.events,
                "first_at": each.seen.first_at.isoformat(timespec="seconds"),
                "last_at": each.seen.last_at.isoformat(timespec="seconds"),
                "aggregate_types": ", ".join(each.seen.aggregate_types),
            }
            for each in wrong
            if each.seen
        ],
    )


_CHECK_CATALOG: Final = """\
Compares documented event types with those in the table: check `event_types_documented`.

Use: its schedule runs it every day. Run it by hand after a deployment that writes new event types. It reads
the rows of all attached days once, with two workers, and blocks no writer or relay.

When it fails: the run says in one line what to correct: no event catalog is configured (OUTBOX_CATALOG_FILE),
the catalog has an error, or the database is unavailable. Undocumented types fail the check, not the run.
"""


def check_catalog(outbox: Outbox) -> Any:
    """Return the job `check_catalog`."""
    selection = dg.AssetSelection.checks(dg.AssetCheckKey(outbox.key("events"), "event_types_documented"))
    return asset_job(outbox, "check_catalog", _CHECK_CATALOG, selection)


_CHECK_CATALOG_SCHEDULE: Final = """\
Runs the job `check_catalog` every day. Leave it on. A skipped tick says which setting is wrong.
"""


def check_catalog_schedule(outbox: Outbox) -> dg.ScheduleDefinition:
    """Return the schedule `check_catalog_schedule`."""

    def one(context: dg.ScheduleEvaluationContext, settings: "Settings") -> ticks.Requests:
        if settings.catalog_file is None:
            return dg.SkipReason("no event catalog configured: set OUTBOX_CATALOG_FILE to check event types")
        return dg.RunRequest()

    # Not on the hour, when many other jobs start.
    return ticks.schedule(outbox, "check_catalog", "7 6 * * *", _CHECK_CATALOG_SCHEDULE, one)
