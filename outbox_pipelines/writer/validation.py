"""Validate payloads with a function of the application, before anything is sent.

Invariants:
- Without such a function, an event costs one additional comparison.
- The function receives plain JSON, as consumers read it: no dates, decimals or models; or bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from outbox_pipelines.writer.errors import InvalidEventError

Check = Callable[[str, object, int | None], object]

check: Check | None = None
"""The function of this process; set by `validate_with`."""


def validate_with(function: Check | None) -> None:
    """Check each further event of this process in `emit`, `emit_many`, `OutboxEvent` and `record`.

    `outbox_pipelines.catalog.validator` makes such a function from JSON Schemas.

    Args:
        function: called with the event type, the payload, as plain JSON or the bytes that it is, and the
            version or None. Its result is ignored; an exception is raised to the writer as
            `InvalidEventError`. None: nothing is checked.
    """
    global check
    check = function


def refuse_invalid(function: Check, event_type: str, payload: str | bytes, version: int | None) -> None:
    """Call the function and raise `InvalidEventError` if it fails; a `payload` that is text is JSON."""
    try:
        function(event_type, payload if isinstance(payload, bytes) else json.loads(payload), version)
    except Exception as error:
        raise InvalidEventError(f"{event_type}: {error}") from error
