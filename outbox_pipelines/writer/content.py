"""Convert an event to its columns, and check them before anything is sent.

An error of the database would abort the caller's transaction.

Invariants:
- Content refused here would also be refused by the database, or misread by a consumer.
- Content that the database accepts is not refused for its size.
- Without a function of the application that validates payloads, an event costs one additional comparison. The
  function receives plain JSON, as consumers read it: no dates, decimals or models; or bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from outbox_pipelines.writer.bytes_payload import BytesPayload
from outbox_pipelines.writer.context import Surroundings
from outbox_pipelines.writer.errors import InvalidEventError, OutboxError, PayloadTooLargeError
from outbox_pipelines.writer.events import NewEvent
from outbox_pipelines.writer.json_text import to_json
from outbox_pipelines.writer.names import as_text, id_as_text, refuse_exchanged
from outbox_pipelines.writer.references import Body, LargePayload

LIMIT: Final = 1_000_000
"""Bytes of a payload's JSON text, or of a `BytesPayload`, as the guard in the database counts them."""
_HEADERS_LIMIT: Final = 100_000
_TEXT_LIMIT: Final = 10_000
"""Bytes of a name, an id or a key."""
_SHORT: Final = _TEXT_LIMIT // 4
"""Characters of a text that is within the limit whatever they are."""


class Row(NamedTuple):
    """An event's columns, in the order of `outbox_emit`'s arguments; payload and headers are JSON text."""

    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str
    headers: str | None
    idempotency_key: str | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    version: int | None
    deliver_after: str | None = None
    """A time, or a duration from now on, in ISO 8601."""
    later_events_wait: bool | None = None
    """None for False."""


def row(event: NewEvent, around: Surroundings) -> Row:
    """Return an event's row; ids and trace that the event does not set come from its surroundings.

    Raises:
        OutboxError: the event cannot be written; nothing was sent.
    """
    (
        aggregate_type,
        aggregate_id,
        event_type,
        payload,
        headers,
        key,
        correlation_id,
        causation_id,
        traceparent,
        version,
        deliver_after,
        later_events_wait,
    ) = event
    if headers is not None and not isinstance(headers, Mapping):
        raise OutboxError(f"headers are a {type(headers).__name__}: give a mapping from names to values")
    if traceparent is None:
        traceparent = around.traceparent
        if around.tracestate is not None:
            headers = {"tracestate": around.tracestate, **(headers or {})}
    elif not _TRACEPARENT.fullmatch(_text("traceparent", traceparent)):
        raise OutboxError(
            f"traceparent {traceparent!r} is not in W3C's form 00-<32 hex digits>-<16 hex digits>-<2 "
            "hex digits>, in lower case, without an id of zeros: omit an invalid one"
        )
    if correlation_id is None:
        correlation_id = around.correlation_id
    if causation_id is None:
        causation_id = around.causation_id
    made = Row(
        name("aggregate_type", aggregate_type),
        str(aggregate_id)
        if type(aggregate_id) is int and aggregate_id.bit_length() < 64
        else name("aggregate_id", aggregate_id),
        name("event_type", event_type),
        _payload(payload),
        None if headers is None else _headers(to_json("headers", _not_reserved(dict(headers)))),
        None if key is None else name("idempotency_key", key),
        None if correlation_id is None else _text("correlation_id", correlation_id),
        None if causation_id is None else _text("causation_id", causation_id),
        traceparent,
        None if version is None else _version(version),
        None if deliver_after is None else _due(deliver_after),
        True if later_events_wait is not False else None,
    )
    if made.later_events_wait and later_events_wait is not True:
        raise OutboxError(f"later_events_wait is {later_events_wait!r}: give True or False")
    if made.later_events_wait and made.deliver_after is None:
        raise OutboxError("later_events_wait is True, but the event is not delayed: give deliver_after too")
    refuse_exchanged(made.aggregate_type, made.aggregate_id, made.event_type)
    if check is not None:
        content = payload.content if isinstance(payload, BytesPayload | LargePayload) else None
        seen = content if isinstance(content, bytes) else made.payload
        refuse_invalid(check, made.event_type, seen, made.version)
    return made


# The same list as in the database's guard. The relay sets these headers from an event's columns.
RESERVED: Final = re.compile(
    r"id|event-type|aggregate-type|aggregate-id|idempotency-key|correlation-id|causation-id|traceparent|version"
    r"|content-type|dead-letter-.*|replay-id|replayed-at",
    re.IGNORECASE | re.DOTALL,
)


def _not_reserved(headers: dict[str, object]) -> dict[str, object]:
    if reserved := [name for name in headers if isinstance(name, str) and RESERVED.fullmatch(name)]:
        raise OutboxError(
            f"headers have reserved names: {', '.join(reserved)}. The relay sets these; use the argument of "
            "that name, or rename the header"
        )
    return headers


def name(column: str, value: object) -> str:
    """Return a nonempty text; an `aggregate_id` may have another type."""
    if type(value) is str and 0 < len(value) <= _SHORT and value.isascii() and "\0" not in value:
        # Nearly every one; the checks below take three times as long.
        return value
    if value is None:
        hint = "give it a value"
        if column == "aggregate_id":
            hint = "an id that the database generates is known after the INSERT (`session.flush()`)"
        raise OutboxError(f"{column} is None: {hint}")
    text = _text(column, value)
    if not text:
        raise OutboxError(f"{column} is empty: give it a value")
    return text


def _text(column: str, value: object) -> str:
    if type(value) is not str:
        value = id_as_text(value) if column == "aggregate_id" else as_text(column, value)
    if "\0" in value:
        raise OutboxError(f"{column} has a NUL character, which PostgreSQL does not store: remove it")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise OutboxError(f"{column} has half of a surrogate pair, which is not text: {error}") from error
    if len(value) > _SHORT and (size := len(value.encode())) > _TEXT_LIMIT:
        raise OutboxError(
            f"{column} has {size:,} bytes, more than {_TEXT_LIMIT:,}: put content into the payload"
        )
    return value


def _payload(value: object) -> str:
    if isinstance(value, BytesPayload):
        text = value.text()
        if (size := len(value.content)) > LIMIT:
            raise PayloadTooLargeError(f"the payload has {size:,} bytes, more than {LIMIT:,}: {ADVICE}")
        return text
    text = value.text() if isinstance(value, LargePayload) else to_json("payload", value)
    if isinstance(text, Body):
        return text
    # No character has more than four bytes: a short text needs no counting.
    if len(text) * 4 > LIMIT and len(text.encode()) > LIMIT and (size := _stored_size(text)) > LIMIT:
        raise PayloadTooLargeError(f"the payload has {size:,} bytes as JSON, more than {LIMIT:,}: {ADVICE}")
    return text


def _headers(text: str) -> str:
    if len(text) * 4 > _HEADERS_LIMIT and (size := _stored_size(text)) > _HEADERS_LIMIT:
        raise OutboxError(
            f"the headers have {size:,} bytes as JSON, more than {_HEADERS_LIMIT:,}: put content into "
            "the payload"
        )
    return text


ADVICE: Final = "store it as an object and send the reference, as `bodies.large(payload)` does"


def _stored_size(text: str) -> int:
    """Return the size that the database counts, or slightly less: it drops repeated names and -0.0."""
    stored = json.loads(text, parse_float=lambda digits: float(digits) + 0.0)
    return len(json.dumps(stored, ensure_ascii=False).encode())


def _version(value: object) -> int:
    if isinstance(value, int) and -(2**31) <= value < 2**31:
        # The number of an enumeration or a bool: not every driver sends these.
        return int(value)
    raise OutboxError(f"version is {value!r}: give an integer of 32 bits")


# A day more than ten years can have.
_LATEST: Final = timedelta(days=3654)
_NOW: Final = timedelta()


def _due(value: object) -> str:
    if isinstance(value, timedelta):
        if value > _LATEST:
            raise OutboxError(f"deliver_after is {value.days:,} days from now: at most ten years")
        # Any past means at once, also one that PostgreSQL's interval cannot have.
        return f"PT{max(value, _NOW).total_seconds():.6f}S"
    if not isinstance(value, datetime):
        raise OutboxError(f"deliver_after is {value!r}: give a datetime with a zone, or a timedelta")
    if value.utcoffset() is None:
        raise OutboxError(f"deliver_after {value.isoformat()} has no time zone: give one, such as UTC")
    return value.isoformat()


# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


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
