"""The check of a day's rows, before they are archived."""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
import time
import warnings

import dagster as dg

from outbox_pipelines.defs import places
from outbox_pipelines.defs.events import DAYS, events
from outbox_pipelines.defs.failures import day_of, one_line
from outbox_pipelines.defs.resources import OutboxResource

# Every process that loads the definitions would print it.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)


@dg.asset_check(
    asset=events.key,
    name="events_as_expected",
    partitions_def=DAYS,
    # Not blocking: what is wrong with published events is wrong in every consumer already. A day that is not
    # archived would only stay in the table, and rows that are odd are worth keeping more than others.
    blocking=False,
    # Of the steps that may begin, Dagster's in-process executor takes the highest first: the verdict is there
    # before the file.
    op_tags={"dagster/priority": "1"},
    description="""Whether the rows of a day are what they should be, just before they are archived.

Errors: an event with a time of another day, a `seq` that is there twice. Warnings: an idempotency key that is
there twice, empty names, a payload that is no object; and with a catalogue (OUTBOX_CATALOG_FILE) event types
that it does not have, and payloads that lack a member which their schema requires. The rows are counted by
the database in one statement, and Great Expectations judges the counts. Each day has a verdict of its own.

When it fails: the day is archived all the same, for what is published cannot be changed. The metadata has the
counts, and the event types by name. Mend the writer; `validate_with` makes it refuse such events before they
are written (docs/catalog.md). After an error find out who went past the outbox's guards, and whether they are
there: `outbox migrate --check`.
""",
)
def events_as_expected(
    context: dg.AssetCheckExecutionContext, outbox_pipelines: OutboxResource
) -> dg.AssetCheckResult:
    started = time.monotonic()
    day = day_of(context)
    with one_line():
        # Here, because definitions are to load without the drivers, and without Great Expectations.
        from outbox_pipelines.quality import day_rules, days
        from outbox_pipelines.quality.rules import State

        facts = days.measure(outbox_pipelines.settings(), day)
    if facts is None:
        return dg.AssetCheckResult(passed=True, description=f"{day} is dropped: its rows are gone")
    counted = time.monotonic()
    verdicts = day_rules.judge(facts)
    is_error = State.ERROR in verdicts.values()
    return dg.AssetCheckResult(
        passed=not any(verdicts.values()),
        severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        description=day_rules.summary(facts, verdicts),
        metadata={
            **{name: getattr(facts, name) for name in day_rules.NUMBERS},
            "first_at": str(facts.first_at or "-"),
            "last_at": str(facts.last_at or "-"),
            "lacking_by_type": facts.lacking_by_type,
            "unknown_by_type": facts.unknown_by_type,
            "seconds_to_count": round(counted - started, 3),
            "seconds_to_judge": round(time.monotonic() - counted, 3),
            **places.mark(context),
        },
    )
