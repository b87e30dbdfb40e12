"""Which months are missing, and how their partitions are named.

Invariants:
- The first one begins where the newest partition ends, so that there is neither a gap nor an overlap. The
  others are months of UTC.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

_LONGEST_NAME: Final = 63
# A newest partition that ends in the middle of a month, or at midnight of another zone, is followed by one
# that is longer than a month.
_SHORTEST: Final = timedelta(days=28)
# The usual names, the most precise first.
_FORMATS: Final = ("%Y_%m_%d", "%Y%m%d", "%Y-%m-%d", "y%Ym%m", "%Y_%m", "%Y-%m", "%Y%m")


@dataclass(frozen=True, slots=True)
class Month:
    """A partition to be made: its bounds, in UTC."""

    since: datetime
    until: datetime

    @property
    def middle(self) -> datetime:
        """A time in the month after which it is named."""
        return self.since + (self.until - self.since) / 2


def missing(now: datetime, newest_end: datetime | None, ahead: int) -> Iterator[Month]:
    """Return the months up to `ahead` months after the current one that no partition contains.

    Months before the current one are none: an event of now belongs to none of them.
    """
    current = beginning(now)
    since = current if newest_end is None else max(newest_end, current)
    end = current
    for _ in range(ahead + 1):
        end = next_month(end)
    while since < end:
        until = next_month(since)
        while until - since < _SHORTEST:
            until = next_month(until)
        yield Month(since, until)
        since = until


def beginning(time: datetime) -> datetime:
    """Return the begin of the month of a time."""
    return time.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def next_month(time: datetime) -> datetime:
    """Return the begin of the month after that of a time."""
    return beginning(beginning(time) + timedelta(days=32))


def name(month: Month, table: str, newest: str | None, newest_since: datetime | None) -> str:
    """Return the name of a partition: as that of the newest one, or the table's with `_p2026_11`."""
    if newest is not None and newest_since is not None:
        # Bounds at midnight of another zone may be the evening before.
        for begin in (newest_since, newest_since + timedelta(hours=14)):
            for pattern in _FORMATS:
                if (date := begin.strftime(pattern)) in newest:
                    return newest.replace(date, beginning(month.middle).strftime(pattern))
    suffix = month.middle.strftime("_p%Y_%m")
    return table.encode()[: _LONGEST_NAME - len(suffix)].decode(errors="ignore") + suffix
