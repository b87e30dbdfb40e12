"""Check payloads against the event catalog; the writer does so before it emits an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from jsonschema.exceptions import best_match

from outbox_pipelines.catalog.document import Catalog
from outbox_pipelines.catalog.schemas import checker, place

# Messages repeat the value, which can be the whole payload.
_LONGEST: Final = 200


def compiled(catalog: Catalog, *, refuses_unknown: bool) -> Callable[[str, object], None]:
    """See `outbox_pipelines.catalog.validator`."""
    checkers = {
        name: checker(each.payload) for name, each in catalog.events.items() if each.payload is not None
    }
    retired = {name for name, each in catalog.events.items() if each.lifecycle == "retired"}

    def check(event_type: str, payload: object) -> None:
        found = checkers.get(event_type)
        if event_type in retired:
            raise ValueError("this event type is retired: use another one, or change its lifecycle")
        if found is None:
            if refuses_unknown and event_type not in catalog.events:
                raise ValueError("event type is not in the event catalog: document it, or correct the name")
            return
        error = best_match(found.iter_errors(payload))
        if error is not None:
            raise ValueError(f"{place(error.absolute_path, 'payload')}: {_short(error.message)}")

    return check


def _short(message: str) -> str:
    """Shorten a message; keep its beginning (the value) and its end (the problem)."""
    half = _LONGEST // 2
    return message if len(message) <= _LONGEST else f"{message[:half]} … {message[-half:]}"
