"""The names of a message's headers (OUTBOX_HEADER_NAMES) and of what `flat` adds (OUTBOX_FLAT_MEMBERS)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

from outbox_pipelines.config.tables import as_table, each_checked

COLUMNS: Final = ("id", "event-type", "aggregate-type", "aggregate-id")
"""Headers from columns that are never null. The aggregate's id is the key, and a header if requested."""
METADATA: Final = ("idempotency-key", "correlation-id", "causation-id", "traceparent", "version")
USUAL: Final = ("id", "event-type", "aggregate-type", *METADATA)
CONTENT_TYPE: Final = "content-type"
"""How to read the value: set by the value format."""
REPLAY_ID: Final = "replay-id"
REPLAYED_AT: Final = "replayed-at"
REPLAY: Final = (REPLAY_ID, REPLAYED_AT)
"""Headers of replayed events alone. Their names are fixed: every consumer must recognize a replay."""
IDEMPOTENCY_KEY: Final = "idempotency_key"
_MEMBERS: Final = ("event_id", "event_type", "aggregate_type", "aggregate_id", IDEMPOTENCY_KEY)


def read_headers(given: Any) -> dict[str, str]:
    """Return the name of each header in Kafka, by ours, without headers that are left out.

    Args:
        given: see `as_table`; an empty value leaves a name out.

    Raises:
        ValueError: the table is not valid.
    """
    names = _read(given, "header", (*COLUMNS, *METADATA), USUAL, "id=event-id,aggregate-type=")
    if "id" not in names:
        raise ValueError("id cannot be left out: consumers deduplicate by it")
    if CONTENT_TYPE in names.values():
        raise ValueError(f"{CONTENT_TYPE} says how to read the value: choose another name")
    if taken := [theirs for theirs in names.values() if theirs.lower() in REPLAY]:
        raise ValueError(f"{taken[0]} marks replayed events: choose another name")
    return names


def read_members(given: Any) -> dict[str, str]:
    """Return the same of each member that is added to a body."""
    return _read(given, "member", _MEMBERS, ("event_type", IDEMPOTENCY_KEY), "event_type=type,event_id=id")


def _read(given: Any, what: str, known: Iterable[str], usual: Iterable[str], example: str) -> dict[str, str]:
    def one(ours: str, theirs: Any) -> str:
        if ours not in known:
            raise ValueError(f"unknown {what} {ours!r}: use {', '.join(known)}")
        # A connection string in a wrong place; the message must not repeat its password.
        if not isinstance(theirs, str) or "://" in theirs:
            raise ValueError(f"write a name for the {what} {ours}, not an address: for example {example}")
        return theirs

    names = {name: name for name in usual} | each_checked(as_table(given).items(), one)
    names = {ours: theirs for ours, theirs in names.items() if theirs}
    taken = sorted(names.values())
    if twice := [name for name, after in pairwise(taken) if name == after]:
        raise ValueError(f"two {what}s would have the name {twice[0]}: choose another name for one")
    return names
