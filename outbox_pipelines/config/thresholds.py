"""Tables of numbers: OUTBOX_WARN_AT and OUTBOX_ERROR_AT of checks, OUTBOX_ARCHIVE_RETENTION_DAYS."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked

CHECKS: Final = (
    "lag",
    "backlog",
    "blocked_aggregates",
    "dead_letters",
    "delayed",
    "replays",
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
LEAST: Final = frozenset(("partitions_ahead",))
"""Those of which low values are bad."""


def read_thresholds(given: Any) -> dict[str, float | None]:
    """Return the limits of a table such as ``lag=30,backlog=off``, by the name of the rule; None for off.

    Raises:
        ValueError: a name is unknown, or a limit is not a number.
    """
    return each_checked(as_table(given).items(), _limit)


def check_order(warn: dict[str, Any], error: dict[str, Any]) -> None:
    """Raise `ValueError` if a warning would begin after the error of the same check."""
    for name in sorted(warn.keys() & error.keys()):
        first, then = _limit(name, warn[name]), _limit(name, error[name])
        if first is not None and then is not None and (first < then if name in LEAST else first > then):
            raise ValueError(
                f"{name}={error[name]} is reached before the warning, {name}={warn[name]} in OUTBOX_WARN_AT: "
                "exchange them, or turn one off"
            )


def _limit(name: str, limit: Any) -> float | None:
    if name not in CHECKS:
        raise ValueError(f"no check is named {name!r}: write NAME=LIMIT,… with {', '.join(CHECKS)}")
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
