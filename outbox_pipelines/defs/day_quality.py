"""The check of a day's rows, before they are archived."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time
import warnings
from typing import Final

import dagster as dg

from outbox_pipelines.defs import places
from outbox_pipelines.defs.failures import day_of, one_line
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.text import markdown

# Every process that loads the definitions would print it.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)


_EVENTS_AS_EXPECTED: Final = """\
Whether the rows of a day are as expected, just before they are archived.

Errors: an event with a time of another day, a duplicate `seq`. Warnings: a duplicate idempotency key, empty
names, a payload that is not an object. With an event catalog (OUTBOX_CATALOG_FILE) also: event types that are
not in it, and payloads that lack a member required by their schema. The database counts the rows in one
statement, and Great Expectations judges the counts. Each day has its own result.

When it fails: the day is archived all the same, because published events cannot be changed. The metadata has
the counts, and the event types by name. Correct the writer; `validate_with` refuses such events before they
are written (docs/catalog.md). After an error, find out who bypassed the outbox's guards, and whether the
guards exist: `outbox migrate --check`.
"""


def events_as_expected(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return the check `events_as_expected`."""

    @dg.asset_check(
        asset=outbox.key("events"),
        name="events_as_expected",
        partitions_def=outbox.days,
        # Not blocking: an error in published events has already reached every consumer. An unarchived day
        # would only stay in the table, and unusual rows are the ones most worth keeping.
        blocking=False,
        # Dagster's in-process executor runs the ready step of the highest priority first: the result is
        # reported before the file is written.
        op_tags={"dagster/priority": "1"},
        description=outbox.text(_EVENTS_AS_EXPECTED),
    )
    def events_as_expected(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        started = time.monotonic()
        day = day_of(context)
        with one_line():
            # Imported here so that definitions load without the drivers and Great Expectations.
            from outbox_pipelines.quality import day_rules, days
            from outbox_pipelines.quality.rules import Status

            facts = days.measure(outbox.load_settings(), day)
        if facts is None:
            return dg.AssetCheckResult(
                passed=True, description=f"{day} is dropped: the table has no rows of it"
            )
        counted = time.monotonic()
        results = day_rules.judge(facts)
        is_error = Status.ERROR in results.values()
        return dg.AssetCheckResult(
            passed=not any(results.values()),
            severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
            description=markdown(day_rules.summary(facts, results)),
            metadata={
                **{name: getattr(facts, name) for name in day_rules.NUMBERS},
                "first_at": str(facts.first_at or "-"),
                "last_at": str(facts.last_at or "-"),
                "lacking_by_type": facts.lacking_by_type,
                "unknown_by_type": facts.unknown_by_type,
                "seconds_to_count": round(counted - started, 3),
                "seconds_to_judge": round(time.monotonic() - counted, 3),
                **places.mark(context, outbox),
            },
        )

    return events_as_expected
