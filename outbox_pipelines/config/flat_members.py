"""The members that OUTBOX_VALUE_FORMAT=flat adds to a body, and their names: OUTBOX_FLAT_MEMBERS."""

from __future__ import annotations

from typing import Any, Final

from outbox_pipelines.config.tables import read_names

_COLUMNS: Final = ("event_id", "event_type", "aggregate_type", "aggregate_id")
IDEMPOTENCY_KEY: Final = "idempotency_key"
_USUAL: Final = ("event_type", IDEMPOTENCY_KEY)


def flat_members(given: Any) -> dict[str, str]:
    """Return the name of each member that is added, without those that are left out; see `as_table`.

    Raises:
        ValueError: the table is not valid.
    """
    return read_names(given, "member", (*_COLUMNS, IDEMPOTENCY_KEY), _USUAL, "event_type=type,event_id=id")
