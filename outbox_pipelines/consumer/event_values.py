"""The value of a message: the frame that names its schema, and the payload in its JSON.

Invariants:
- It needs neither a registry nor a setting.
- Messages never have the content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from outbox_pipelines.writer.bytes_payload import is_json_text

CONTENT_TYPE: Final = "content-type"
ENVELOPE: Final = frozenset(
    ("event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "timestamp")
)
# As Confluent's clients write the id, or the GUID, of a schema: the header, and sizes by the first byte.
_SCHEMA_ID: Final = "__value_schema_id"
_FRAMES: Final = {b"\0": 5, b"\1": 17}


class _Event(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def content_type(self) -> str | None: ...


def parsed(event: _Event) -> Any:
    """Return the body in an event's value, taken out of an envelope, a CloudEvent or a frame.

    None for a tombstone; bytes where the content type is not JSON.

    Raises:
        ValueError: the value is not JSON that Python reads.
    """
    if event.value is None or not is_json(event.content_type):
        return event.value
    try:
        body = json.loads(json_of(event.value))
    except (ValueError, RecursionError) as error:
        raise ValueError(_why(event.value, error)) from None
    if is_cloudevent(body) and body["id"] == event.id:
        return body.get("data")
    if is_envelope(body) and body["event_id"] == event.id:
        return body["payload"]
    return body


def _why(value: bytes, error: Exception) -> str:
    if not value:
        return "its value is empty, and is not JSON"
    if isinstance(error, json.JSONDecodeError):
        return f"its value is not JSON: {error}"
    if isinstance(error, UnicodeDecodeError):
        return "its value is not JSON: it is not UTF-8"
    if isinstance(error, RecursionError):
        return "its value is nested too deeply"
    return "its value has an integer with more digits than Python reads"


def json_of(value: bytes) -> bytes:
    """Return a value without the 5 bytes with the id of its schema, if it begins with them.

    It needs neither a registry nor a setting: JSON in UTF-8 never begins with the byte 0.
    """
    return value[5:] if value[:1] == b"\0" else value


def framed(value: bytes | None, headers: Mapping[str, str | None]) -> tuple[bytes, bytes] | None:
    """Return what names the schema of a value in a registry, and its body; None for a value without a schema.

    An id is the byte 0 and 4 bytes, a GUID the byte 1 and 16, in a header or before the body.
    """
    if value is None:
        return None
    given = headers.get(_SCHEMA_ID)
    if given is not None:
        frame = given.encode(errors="surrogateescape")
        size = _FRAMES.get(frame[:1], 0)
        # What follows is the index of a message of Protobuf, which in a value follows the frame, too.
        return (frame[:size], frame[size:] + value) if 0 < size <= len(frame) else None
    if not is_json(headers.get(CONTENT_TYPE)):
        return None
    size = _FRAMES.get(value[:1], 0)
    return (value[:size], value[size:]) if 0 < size <= len(value) else None


def is_json(content_type: str | None) -> bool:
    """Return whether a value can be JSON, as most are, which have no content type."""
    return not content_type or is_json_text(content_type)


def is_envelope(body: object) -> bool:
    return isinstance(body, dict) and body.keys() == ENVELOPE


def is_cloudevent(body: object) -> bool:
    return isinstance(body, dict) and "specversion" in body and {"id", "type", "source"} <= body.keys()
