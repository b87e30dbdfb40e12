"""The headers of a message and their names in Kafka: OUTBOX_HEADER_NAMES."""

from __future__ import annotations

from typing import Any, Final

from outbox_pipelines.config.tables import read_names

COLUMNS: Final = ("id", "event-type", "aggregate-type", "aggregate-id")
"""From columns that are never null. The aggregate's id is the key, and a header if requested."""
METADATA: Final = ("idempotency-key", "correlation-id", "causation-id", "traceparent", "version")
USUAL: Final = ("id", "event-type", "aggregate-type", *METADATA)
CONTENT_TYPE: Final = "content-type"
"""How to read the value: set by the value format."""


def header_names(given: Any) -> dict[str, str]:
    """Return the name of each header in Kafka, without headers that are left out; see `as_table`.

    Raises:
        ValueError: the table is not valid.
    """
    names = read_names(given, "header", (*COLUMNS, *METADATA), USUAL, "id=event-id,aggregate-type=")
    if "id" not in names:
        raise ValueError("id cannot be left out: consumers deduplicate by it")
    if CONTENT_TYPE in names.values():
        raise ValueError(f"{CONTENT_TYPE} says how to read the value: choose another name")
    return names
