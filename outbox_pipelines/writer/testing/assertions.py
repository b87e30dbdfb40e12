"""Assertions about emitted events; a failure shows which event is missing, and which were emitted.

Invariants:
- An event emitted twice fails like one that was not emitted.
- Expected values are compared as JSON: an expected Decimal equals its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from outbox_pipelines.writer.content import name
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.json_text import to_json
from outbox_pipelines.writer.testing.written import WrittenEvent

_SHOWN: Final = 20
_LENGTH: Final = 300
_NOT_EQUAL: Final = ({bool, int}, {bool, float})


def assert_emitted(
    events: Iterable[WrittenEvent],
    event_type: str,
    *,
    aggregate_type: object = ...,
    aggregate_id: object = ...,
    payload: object = ...,
    headers: object = ...,
    idempotency_key: object = ...,
    correlation_id: object = ...,
    causation_id: object = ...,
    traceparent: object = ...,
    version: object = ...,
) -> WrittenEvent:
    """Assert that exactly one event matches, and return it.

    An omitted argument matches any value, and so does ``...``: ``payload={"id": ..., "total": 5}`` expects
    some id. A mapping, at any depth, must have the given members and may have others. Lists are compared as a
    whole.

    Raises:
        AssertionError: no event or several events match; the message shows how each event differs.
    """
    __tracebackhide__ = True
    if aggregate_id is not ...:
        aggregate_id = name("aggregate_id", aggregate_id)
    given = {
        "aggregate_type": aggregate_type,
        "aggregate_id": aggregate_id,
        "event_type": event_type,
        "payload": payload,
        "headers": headers,
        "idempotency_key": idempotency_key,
        "correlation_id": correlation_id,
        "causation_id": causation_id,
        "traceparent": traceparent,
        "version": version,
    }
    expected = {column: value for column, value in given.items() if value is not ...}
    events = list(events)
    found = [event for event in events if not list(_differences("", expected, event._asdict()))]
    if len(found) == 1:
        return found[0]
    wanted = ", ".join(f"{column}={value!r}" for column, value in expected.items())
    if found:
        raise AssertionError(f"{len(found)} events instead of one have {wanted}:\n{_listed(found, {})}")
    raise AssertionError(f"no event has {wanted}; emitted:\n{_listed(events, expected)}")


def assert_nothing_emitted(events: Iterable[WrittenEvent]) -> None:
    """Assert that no event was emitted.

    Raises:
        AssertionError: events were emitted; the message lists them.
    """
    __tracebackhide__ = True
    events = list(events)
    if events:
        raise AssertionError(f"nothing should be emitted; emitted:\n{_listed(events, {})}")


def _listed(events: list[WrittenEvent], expected: Mapping[str, Any]) -> str:
    lines = []
    for event in events[:_SHOWN]:
        about = f"{event.event_type} of {event.aggregate_type} {event.aggregate_id}"
        lines.append(f"  {about}: {_short(event.payload)}")
        if event.event_type == expected.get("event_type"):
            lines += (f"    {difference}" for difference in _differences("", expected, event._asdict()))
    if len(events) > _SHOWN:
        lines.append(f"  and {len(events) - _SHOWN} more")
    return "\n".join(lines) or "  nothing"


def _differences(path: str, expected: object, found: object) -> Iterator[str]:
    if expected is ...:
        return
    if not isinstance(expected, Mapping):
        expected = _as_json(expected)
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for member, value in expected.items():
            where = f"{path}.{member}" if path else str(member)
            if str(member) in found:
                yield from _differences(where, value, found[str(member)])
            else:
                yield f"{where} is missing"
    # To Python True is 1, to JSON it is not.
    elif expected != found or {type(expected), type(found)} in _NOT_EQUAL:
        yield f"{path} is {_short(found)}, not {_short(expected)}"


def _as_json(value: object) -> object:
    """Return the value as a consumer reads it; unchanged if it is not JSON (`mock.ANY`, `pytest.approx`)."""
    try:
        return json.loads(to_json("what is expected", value))
    except OutboxError:
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"
