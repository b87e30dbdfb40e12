"""Validate the measurements of the last hour: the distribution of latency, and failures by the minute.

Invariants:
- Nothing is measured here: relays record their progress every second, and failures have their times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.core.table_locks import reading_only
from outbox_pipelines.database.schema import connect_to_outbox
from outbox_pipelines.quality.expectations import checkpoint
from outbox_pipelines.quality.expectations.checkpoint import Finding, suite_name
from outbox_pipelines.quality.rules import rules
from outbox_pipelines.settings import CheckSettings, OutboxSettings

if TYPE_CHECKING:
    import pandas as pd


# What relays have recorded: at most one row for each second and shard, while events are published. A row in
# the future is from before the clock of the database went back.
PUBLISHED: Final = """
SELECT at, shard, events, latency AS latency_seconds FROM outbox_progress
WHERE at > clock_timestamp() - interval '1 hour' AND at <= clock_timestamp() ORDER BY at, shard"""

# A row for each minute, also for one without a failure. Dead letters are counted when they failed; events
# that were published after a rejection, when they were published.
FAILED: Final = """
SELECT m.at, coalesce(d.events, 0) AS dead_letters, coalesce(r.events, 0) AS published_late
FROM generate_series(date_trunc('minute', clock_timestamp()) - interval '59 minutes',
                     date_trunc('minute', clock_timestamp()), interval '1 minute') AS m(at)
LEFT JOIN (SELECT date_trunc('minute', failed_at) AS at, count(*) AS events FROM outbox_parked
           WHERE state IN ('failed', 'replaying') AND failed_at > clock_timestamp() - interval '1 hour'
           GROUP BY 1) d USING (at)
LEFT JOIN (SELECT date_trunc('minute', published_at) AS at, count(*) AS events FROM outbox_released
           WHERE published_at > clock_timestamp() - interval '1 hour' AND attempts > 0
           GROUP BY 1) r USING (at)
ORDER BY m.at"""
_MEDIAN: Final = 1.0
"""Seconds of latency: most events are published within milliseconds."""
_MOST_LATE: Final = 100
"""Events that were rejected before they were published."""


def validate(settings: CheckSettings) -> list[Finding]:
    """Validate the last hour by Checkpoints; the suite of the latency is left out if nothing was published.

    Raises:
        SetupError: the database is unavailable or has no outbox, or the project cannot be used.
    """
    published, failed = read(settings)
    name = suite_name(settings, "hour")
    found = []
    if len(published):
        found += checkpoint.run(
            name, published, _of_lag(settings), own=f"{name}_own", project=settings.expectations
        )
    return found + checkpoint.run(f"{name}_failures", failed, _of_failures(), project=settings.expectations)


@reading_only()
def read(settings: OutboxSettings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what was published, by second and shard, and what failed, by minute."""
    import pandas as pd

    frames = []
    with connect_to_outbox(settings, name="outbox quality: last hour") as connection:
        for query in (PUBLISHED, FAILED):
            found = connection.execute(query)
            names = [column.name for column in found.description or ()]
            frames.append(pd.DataFrame(found.fetchall(), columns=names))
    published, failed = frames
    return published, failed


def _of_lag(settings: CheckSettings) -> list[Any]:
    from great_expectations import expectations as gxe

    (limits,) = (rule for rule in rules(settings) if rule.name == "lag")
    said: dict[str, Any] = {"column": "latency_seconds", "severity": "warning"}
    expected: list[Any] = [gxe.ExpectColumnMedianToBeBetween(max_value=_MEDIAN, **said)]
    if limits.warn is not None:
        expected.append(gxe.ExpectColumnValuesToBeBetween(max_value=limits.warn, mostly=0.95, **said))
    if limits.error is not None:
        expected.append(gxe.ExpectColumnMaxToBeBetween(max_value=limits.error, **said))
    return expected


def _of_failures() -> list[Any]:
    from great_expectations import expectations as gxe

    return [
        gxe.ExpectColumnSumToBeBetween(column="dead_letters", max_value=0, severity="warning"),
        gxe.ExpectColumnSumToBeBetween(column="published_late", max_value=_MOST_LATE, severity="warning"),
    ]
