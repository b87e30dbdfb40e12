"""The headers of a message and their names in Kafka: OUTBOX_HEADER_NAMES."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

COLUMNS: Final = ("id", "event-type", "aggregate-type", "aggregate-id")
"""From columns that are never null. The aggregate's id is the key, and a header if requested."""
METADATA: Final = ("idempotency-key", "correlation-id", "causation-id", "traceparent", "version")
USUAL: Final = ("id", "event-type", "aggregate-type", *METADATA)
CONTENT_TYPE: Final = "content-type"
"""How to read the value: set by the value format."""


def header_names(text: str) -> dict[str, str]:
    """Return the name of each header in Kafka, from ``name=name,…``, without headers that are left out.

    Raises:
        ValueError: the text is not valid.
    """
    names = {name: name for name in USUAL}
    given: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{part!r} is not name=name: write for example id=event-id,aggregate-type=")
        if ours not in (*COLUMNS, *METADATA):
            raise ValueError(f"unknown header {ours!r}: use {', '.join((*COLUMNS, *METADATA))}")
        if ours in given:
            raise ValueError(f"{ours} appears twice: keep one")
        given.add(ours)
        names[ours] = theirs
    if not names["id"]:
        raise ValueError("id cannot be left out: consumers deduplicate by it")
    names = {ours: theirs for ours, theirs in names.items() if theirs}
    taken = sorted(names.values())
    if twice := [name for name, after in pairwise(taken) if name == after]:
        raise ValueError(f"two headers would have the name {twice[0]}: choose another name for one")
    if CONTENT_TYPE in taken:
        raise ValueError(f"{CONTENT_TYPE} says how to read the value: choose another name")
    return names
