"""The retention of the archive: OUTBOX_ARCHIVE_RETENTION_DAYS."""

from __future__ import annotations

import re
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked

_MOST: Final = 36_500
RETENTION_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "additionalProperties": {"type": "integer", "minimum": 1, "maximum": _MOST},
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
        if not re.fullmatch("[0-9]{1,5}", str(number)) or not 1 <= int(number) <= _MOST:
            raise ValueError(f"{name}={number} is not a number of days: write {name}=N, 1 to {_MOST}")
        if int(number) < least:
            raise ValueError(f"{name}={number} is less than OUTBOX_RETENTION_DAYS ({least}): write more days")
        return int(number)

    return each_checked(as_table(given).items(), days)
