"""Thresholds of checks: OUTBOX_WARN_AT and OUTBOX_ERROR_AT."""

from __future__ import annotations

import math
from typing import Final

CHECKS: Final = (
    "lag",
    "backlog",
    "blocked_aggregates",
    "dead_letters",
    "partitions_ahead",
    "days_closed",
    "days_archived",
    "days_dropped",
    "days_attached",
    "shards_relayed",
    "kafka",
    "slot",
    "slot_log",
    "connector",
    "connector_lag",
    "old_transactions",
    "keys",
)
"""The names of `quality.rules.RULES`, which settings cannot import."""


def read_thresholds(text: str) -> dict[str, float | None]:
    """Return the limits in a text such as ``lag=30,backlog=off``, by the name of the rule; None for off.

    Raises:
        ValueError: a name is unknown, or a limit is not a number.
    """
    limits: dict[str, float | None] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, limit = (part.strip() for part in item.partition("="))
        if name not in CHECKS:
            raise ValueError(f"no check is named {name!r}: write NAME=LIMIT,… with {', '.join(CHECKS)}")
        try:
            limits[name] = None if limit == "off" else _number(limit)
        except ValueError:
            raise ValueError(f"{item!r} has no limit: write {name}=NUMBER, or {name}=off") from None
    return limits


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number
