"""Tables of numbers: OUTBOX_WARN_AT and OUTBOX_ERROR_AT of checks, OUTBOX_ARCHIVE_RETENTION_DAYS."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked

LIMITS: Final[dict[str, tuple[float | None, float | None]]] = {
    "lag": (15.0, 60.0),
    "backlog": (100_000.0, None),
    "blocked_aggregates": (1.0, 100.0),
    "dead_letters": (None, 1.0),
    "delayed": (60.0, 300.0),
    "replays": (60.0, None),
    "partitions_ahead": (None, 7.0),
    "days_closed": (None, 1.0),
    "days_archived": (None, 1.0),
    "days_dropped": (1.0, 7.0),
    "days_attached": (None, 1.0),
    "shards_relayed": (15.0, 30.0),
    "kafka": (None, 1.0),
    "slot": (1.0, None),
    "slot_log": (1e9, 10e9),
    "connector": (None, 1.0),
    "connector_lag": (120.0, 300.0),
    "old_transactions": (600.0, 3600.0),
    "idempotency_keys": (50_000_000.0, None),
}
"""For each of `quality.rules.RULES`, from which value on it is a warning, and an error; None for never."""
LEAST: Final = frozenset(("partitions_ahead",))
"""Those of which low values are bad."""


def read_thresholds(given: Any) -> dict[str, float | None]:
    """Return the limits of a table such as ``lag=30,backlog=off``, by the name of the rule; None for off.

    Raises:
        ValueError: a name is unknown, or a limit is not a number.
    """
    return each_checked(as_table(given).items(), _limit)


def check_order(warn: dict[str, Any], error: dict[str, Any]) -> None:
    """Raise `ValueError` if a warning would begin after the error of the same check, given or usual."""
    for name in sorted(warn):
        first = _limit(name, warn[name])
        then = _limit(name, error[name]) if name in error else LIMITS[name][1]
        if first is not None and then is not None and (first < then if name in LEAST else first > then):
            raise ValueError(
                f"{name}={warn[name]} is reached after the error, "
                + (
                    f"{name}={error[name]} in OUTBOX_ERROR_AT: exchange them, or turn one off"
                    if name in error
                    else f"by default {then:,g}: warn earlier, or set {name} in OUTBOX_ERROR_AT, too"
                )
            )


def _limit(name: str, limit: Any) -> float | None:
    if name not in LIMITS:
        raise ValueError(f"no check is named {name!r}: write NAME=LIMIT,… with {', '.join(LIMITS)}")
    try:
        return None if limit == "off" else _number(limit)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={limit} has no limit: write {name}=NUMBER, or {name}=off") from None


def _number(limit: Any) -> float:
    number = float(limit)
    if isinstance(limit, bool) or not math.isfinite(number):
        raise ValueError
    return number


_MOST_DAYS: Final = 36_500
RETENTION_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": {"type": "integer", "minimum": 1, "maximum": _MOST_DAYS},
}
"""The JSON Schema of the table."""


def read_retention(given: Any, least: int) -> dict[str, int]:
    """Return the days of a table such as ``order=2557,*=3653``, by aggregate type.

    Args:
        least: the retention of the table of events in days.

    Raises:
        ValueError: an entry is not a number of days, or less than `least`.
    """

    def days(name: str, number: Any) -> int:
        if not name:
            raise ValueError(
                f"={number} names no aggregate type: write order={number}, or *={number} for all others"
            )
        if not re.fullmatch("[0-9]{1,5}", str(number)) or not 1 <= int(number) <= _MOST_DAYS:
            raise ValueError(f"{name}={number} is not a number of days: write {name}=N, 1 to {_MOST_DAYS}")
        if int(number) < least:
            raise ValueError(f"{name}={number} is less than OUTBOX_RETENTION_DAYS ({least}): write more days")
        return int(number)

    return each_checked(as_table(given).items(), days)
