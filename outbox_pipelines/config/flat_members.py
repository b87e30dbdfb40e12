"""The members that OUTBOX_VALUE_FORMAT=flat adds to a body, and their names: OUTBOX_FLAT_MEMBERS."""

from __future__ import annotations

from typing import Final

from outbox_pipelines.config.names import read_names

_COLUMNS: Final = ("event_id", "event_type", "aggregate_type", "aggregate_id")
IDEMPOTENCY_KEY: Final = "idempotency_key"
_USUAL: Final = ("event_type", IDEMPOTENCY_KEY)


def flat_members(text: str) -> dict[str, str]:
    """Return the name of each member that is added, from ``name=name,…``, without those that are left out.

    Raises:
        ValueError: the text is not valid.
    """
    return read_names(text, "member", (*_COLUMNS, IDEMPOTENCY_KEY), _USUAL, "event_type=type,event_id=id")
