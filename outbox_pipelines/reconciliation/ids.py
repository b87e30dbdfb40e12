"""Ids of version 7 tell when they were drawn: which lie within a time."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Final

DAY_MS: Final = 86_400_000
_RING: Final = 64


def floor(ms: int) -> str:
    """The least id of this millisecond, since 1970."""
    digits = f"{ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-0000-0000-000000000000"


def milliseconds(id: str) -> int:
    """Since 1970, of an id of version 7."""
    return int(id[:8] + id[9:13], 16)


def bounds(day: date) -> tuple[int, int]:
    """Where a UTC day begins and ends, in milliseconds since 1970."""
    start = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    return start, start + DAY_MS


def buckets(first_ms: int, end_ms: int) -> list[int]:
    """Those of `processed_events` that ids of these times can be in: days round a ring."""
    days = range(first_ms // DAY_MS, (end_ms - 1) // DAY_MS + 1)
    return sorted({day % _RING for day in days[:_RING]})


def at(ms: int) -> datetime:
    """The time, UTC."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
