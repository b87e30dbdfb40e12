"""The state of several outboxes, a line for each: for `outbox status --all` and Dagster's overview.

Invariants:
- Outboxes are read side by side; one that cannot be read is a line as well, and delays no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.outboxes import Outboxes
from outbox_pipelines.quality import rules
from outbox_pipelines.quality.measurements import CAP, Measurements, age
from outbox_pipelines.relay import kinds
from outbox_pipelines.settings import CheckSettings, ProcessSettings

UNAVAILABLE: Final = "unavailable"
# Worst first.
_ORDER: Final = (UNAVAILABLE, "error", "warn", "ok")
_AT_ONCE: Final = 16
_HEADINGS: Final = ("OUTBOX", "STATUS", "OLDEST", "BACKLOG", "DEAD LETTERS", "DAYS LATE", "PROBLEM")


@dataclass(frozen=True, slots=True)
class Summary:
    """The state of one outbox."""

    outbox: str
    status: str
    """`ok`, `warn` or `error`, the worst result of its checks; `unavailable` if it cannot be read."""
    oldest_seconds: float | None = None
    """Age of the oldest unpublished event; None if unknown."""
    backlog: int | None = None
    """Unpublished events, counted up to `CAP`."""
    dead_letters: int | None = None
    """Dead letters, counted up to `CAP`."""
    days_late: int | None = None
    """Days that are not closed, archived or dropped in time."""
    problem: str = ""
    """The worst failed check, or why the outbox cannot be read."""
    remedy: str = ""


def read(outboxes: Outboxes) -> list[Summary]:
    """Return the state of each outbox, worst first."""
    found = [Summary(name, UNAVAILABLE, problem=error) for name, error in outboxes.errors.items()]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="outbox-status") as pool:
        found += pool.map(summary, outboxes.settings.values())
    return sorted(found, key=_badness)


def summary(settings: ProcessSettings) -> Summary:
    """Return the state of one outbox."""
    try:
        measured = kinds.of(settings).measure(settings)
    except (SetupError, psycopg.Error) as error:
        return Summary(settings.name, UNAVAILABLE, problem=first_line(error))
    return _of(settings, measured)


def render(found: Iterable[Summary]) -> str:
    """Return a table for a terminal."""
    rows = [_HEADINGS, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    return "\n".join(map(plain, lines))


def _row(one: Summary) -> tuple[str, ...]:
    return (
        one.outbox,
        one.status.upper() if one.status != "ok" else one.status,
        "-" if not one.oldest_seconds else age(one.oldest_seconds),
        _count(one.backlog),
        _count(one.dead_letters),
        _count(one.days_late),
        one.problem,
    )


def _count(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number:,}" if number < CAP else f"{CAP:,}+"


def _of(settings: CheckSettings, found: Measurements) -> Summary:
    failed = sorted(
        (result for result in rules.judge(settings, found) if result.status),
        key=lambda result: -result.status,
    )
    late = found.days_late
    return Summary(
        settings.name,
        rules.worst(failed).name.lower(),
        oldest_seconds=found.oldest_unpublished_seconds,
        backlog=found.unpublished,
        dead_letters=found.dead_letters,
        days_late=max(late.to_close, late.to_archive, late.to_drop),
        problem="; ".join(f"{result.rule.name}: {result.text}" for result in failed[:1]),
        remedy="; ".join(result.rule.help for result in failed[:1]),
    )


def _badness(one: Summary) -> tuple[int, float, str]:
    return _ORDER.index(one.status), -(one.oldest_seconds or 0.0), one.outbox
