"""Ids of version 7 contain the time when they were generated: convert between ids and times."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Final

DAY_MS: Final = 86_400_000
_RING: Final = 64


def floor(ms: int) -> str:
    """Return the lowest id of this millisecond (since 1970)."""
    digits = f"{ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-0000-0000-000000000000"


def milliseconds(id: str) -> int:
    """Return the milliseconds since 1970 of an id of version 7."""
    return int(id[:8] + id[9:13], 16)


def bounds(day: date) -> tuple[int, int]:
    """Return the start and end of a UTC day, in milliseconds since 1970."""
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    return start, start + DAY_MS


def buckets(first_ms: int, end_ms: int) -> list[int]:
    """Return the buckets of `processed_events` (a ring of days) for ids of these times."""
    days = range(first_ms // DAY_MS, (end_ms - 1) // DAY_MS + 1)
    return sorted({day % _RING for day in days[:_RING]})


def at(ms: int) -> datetime:
    """Return the time in UTC."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
