"""The numbers of an archive's days: by period and event type, the largest payloads, the aggregates.

Invariants:
- Memory does not depend on how many events, event types or days there are: DuckDB's is limited, days are
  grouped to at most about 120 periods, and event types to `_TYPES`, the others counted together.
- Quantiles are approximate: exact ones would keep every value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, NamedTuple

import duckdb

from outbox_pipelines.days.archive.data_set import Archive, open_archive
from outbox_pipelines.days.archive.question import refusal
from outbox_pipelines.days.partitions.calendar import require_order
from outbox_pipelines.errors import SetupError

_MEMORY: Final = 400_000_000
_THREADS: Final = 2
_PERIODS: Final = 120
# The days of a period, and its name in DuckDB's date_trunc.
_UNITS: Final = ((1, "day"), (7, "week"), (30, "month"))
_TYPES: Final = 40
_FAILED_TYPES: Final = 10
_LARGEST: Final = 10
_AGGREGATE_TYPES: Final = 20
# The types with most events, and those with most dead letters, which may be rare; and how many types exist.
_KINDS: Final = f"""
SELECT event_type, count(*) OVER () FROM (
    SELECT event_type, count(*) AS events, count(*) FILTER (status = 'FAILED') AS dead
    FROM events WHERE event_date BETWEEN $since AND $until GROUP BY 1)
QUALIFY row_number() OVER (ORDER BY events DESC, event_type) <= {_TYPES}
     OR dead > 0 AND row_number() OVER (ORDER BY dead DESC, event_type) <= {_FAILED_TYPES}"""
# One scan; quantiles cannot be added up later. The outbox has published_at to the second.
_FIGURES: Final = """
SELECT period, GROUPING(kind) = 0, kind,
       count(*), coalesce(sum(size), 0)::BIGINT, coalesce(max(size), 0),
       count(*) FILTER (status = 'FAILED'), count(*) FILTER (status = 'DISCARDED'),
       round(approx_quantile(lag, 0.5), 3), round(approx_quantile(lag, 0.99), 3)
FROM (SELECT date_trunc('{unit}', event_date)::DATE AS period, strlen(payload) AS size, status,
             CASE WHEN list_contains($kinds, event_type) THEN event_type END AS kind,
             CASE WHEN published_at IS NOT NULL  -- `greatest` passes over NULL
                  THEN greatest(epoch_us(published_at) - epoch_us(created_at), 0) / 1e6 END AS lag
      FROM events WHERE event_date BETWEEN $since AND $until)
GROUP BY GROUPING SETS ((period, kind), (period), (kind), ())"""
_PAYLOADS: Final = f"""
SELECT strlen(payload) AS size, event_type, aggregate_type, aggregate_id, event_date, id
FROM events WHERE event_date BETWEEN $since AND $until ORDER BY size DESC, seq LIMIT {_LARGEST}"""
# Two steps: DuckDB writes groups to disk, but no set of distinct values within a group.
_AGGREGATES: Final = f"""
SELECT aggregate_type, count(*), sum(events)::BIGINT AS events, (sum(count(*)) OVER ())::BIGINT FROM (
    SELECT aggregate_type, aggregate_id, count(*) AS events
    FROM events WHERE event_date BETWEEN $since AND $until GROUP BY ALL)
GROUP BY 1 ORDER BY events DESC, 1 LIMIT {_AGGREGATE_TYPES}"""


class Figures(NamedTuple):
    """What is known of some events; sizes in bytes, lags in seconds from `created_at` to `published_at`."""

    events: int = 0
    payload_bytes: int = 0
    largest: int = 0
    dead_letters: int = 0
    """At the time of the archiving, as `discarded`."""
    discarded: int = 0
    lag_median: float | None = None
    lag_p99: float | None = None


class Payload(NamedTuple):
    """One of the largest payloads; its size is in bytes."""

    size: int
    event_type: str
    aggregate_type: str
    aggregate_id: str
    day: date
    id: str


class Aggregates(NamedTuple):
    """The aggregates of a type."""

    aggregate_type: str
    aggregates: int
    events: int
    of_all_types: int
    """Aggregates, also of the types that are not listed."""


@dataclass(frozen=True, slots=True)
class Report:
    """The numbers of the days from `since` to `until`."""

    source: str
    """The outbox that the archive belongs to."""
    since: date
    until: date
    unit: str
    """day, week, month or year."""
    archived: int
    """Days with a file; the others of the range are not archived."""
    periods: tuple[date, ...]
    """The first days of all periods."""
    types: int
    """How many event types there are."""
    total: Figures
    by_period: dict[date, Figures]
    by_type: dict[str | None, Figures]
    """None: the event types that are not listed."""
    by_both: dict[tuple[date, str | None], Figures]
    file_bytes: Counter[date]
    """The size of a period's files."""


def opened(url: str) -> Archive:
    """Open an archive with limited memory; raise as `open_archive`."""
    return open_archive(url, memory_bytes=_MEMORY, threads=_THREADS)


def read(archive: Archive, since: date | None = None, until: date | None = None) -> Report:
    """Return the numbers of an archive's days, by default of all.

    Raises:
        SetupError: no day of the range is archived, or a file cannot be read.
        UnavailableError: the bucket does not answer.
    """
    require_order(since, until)
    days = [day for day in archive.days if (since or day) <= day <= (until or day)]
    if not days:
        raise SetupError(
            f"no day is archived from {since or 'the first'} to {until or 'the last'}: the archive has "
            f"{archive.days[0]} to {archive.days[-1]}"
        )
    archive.require_readable(days)
    since, until = since or days[0], until or days[-1]
    span = (until - since).days + 1
    unit = next((name for length, name in _UNITS if span <= length * _PERIODS), "year")
    parameters = {"since": since, "until": until}
    with _refused():
        kinds = archive.connection.execute(_KINDS, parameters).fetchall()
        found = archive.connection.execute(
            _FIGURES.format(unit=unit), {**parameters, "kinds": [kind for kind, _ in kinds]}
        ).fetchall()
    figures = {(period, is_of_type, kind): Figures(*row) for period, is_of_type, kind, *row in found}
    file_bytes = Counter[date]()
    for day in days:
        file_bytes[_period(day, unit)] += archive.manifests[day].size
    return Report(
        source=str(archive.manifests[days[-1]].source),
        since=since,
        until=until,
        unit=unit,
        archived=len(days),
        periods=tuple(dict.fromkeys(_period(since + timedelta(n), unit) for n in range(span))),
        types=kinds[0][1] if kinds else 0,
        total=figures.get((None, False, None), Figures()),
        by_period={period: row for (period, is_of, _), row in figures.items() if period and not is_of},
        by_type={kind: row for (period, is_of, kind), row in figures.items() if is_of and not period},
        by_both={(period, kind): row for (period, is_of, kind), row in figures.items() if period and is_of},
        file_bytes=file_bytes,
    )


def largest(archive: Archive, report: Report) -> list[Payload]:
    """Return the largest payloads, the largest first; raise as `read`."""
    return [Payload(*row) for row in _ask(archive, _PAYLOADS, report)]


def aggregates(archive: Archive, report: Report) -> list[Aggregates]:
    """Return the types of aggregates with most events; raise as `read`."""
    return [Aggregates(*row) for row in _ask(archive, _AGGREGATES, report)]


def _ask(archive: Archive, query: str, report: Report) -> list[tuple[Any, ...]]:
    with _refused():
        return archive.connection.execute(query, {"since": report.since, "until": report.until}).fetchall()


def _period(day: date, unit: str) -> date:
    """Return the first day of the period, as DuckDB's date_trunc does."""
    match unit:
        case "day":
            return day
        case "week":
            return day - timedelta(day.weekday())
        case "month":
            return day.replace(day=1)
    return day.replace(month=1, day=1)


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        raise refusal(error) from None
