"""Whether a payload is what its event type promises: asked of a function of yours, before anything is sent.

Invariants:
- Where nobody has named one, an event costs one comparison more.
- The function is given plain JSON, as consumers will read it: no dates, decimals or models.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from outbox_pipelines.writer.errors import InvalidEventError

Check = Callable[[str, object], object]

check: Check | None = None
"""Of this process; `validate_with` sets it."""


def validate_with(function: Check | None) -> None:
    """Has each event of this process checked from now on: by `emit`, `emit_many`, `OutboxEvent`, `record`.

    `outbox_pipelines.catalog.validator` makes such a function of JSON Schemas.

    Args:
        function: called with the event type and the payload as plain JSON; its result does not matter, and
            what it raises is an `InvalidEventError` for whoever writes the event. None: nothing is checked.
    """
    global check
    check = function


def refuse_invalid(function: Check, event_type: str, payload: str) -> None:
    """Asks the function; `payload` is JSON text."""
    try:
        function(event_type, json.loads(payload))
    except Exception as error:
        raise InvalidEventError(f"{event_type}: {error}") from error
