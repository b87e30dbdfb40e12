"""Idempotency keys derived from an event's content."""

from __future__ import annotations

import json
from enum import Enum
from typing import Final, Literal

from outbox_pipelines.writer.bytes_payload import BytesPayload
from outbox_pipelines.writer.content import name
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.json_text import jsonable, to_json

Style = Literal["sha256", "sha256-32"]


def derive_key(aggregate_id: object, event_type: str, payload: object, *, style: Style = "sha256") -> str:
    """Return a key that events with equal content share: 64 hex digits, equal in every process and release.

    The payload counts as JSON: the order of members does not matter, 1 and 1.0 differ.

    The key also merges two intended events with the same content: 5 paid twice into one account, a door
    opened again, a state that returns. In such cases add a distinguishing member to the payload
    (the payment's id, a version, the time), or use a key of the request. The aggregate type is not part of
    the key: if ids repeat across types, the event types must differ.

    Args:
        style: "sha256-32" returns the key that producers of some guides make, so that an event which one of
            them has already written is not written again: 32 hex digits of the SHA-256 of
            `f"{aggregate_id}:{event_type}:{json.dumps(payload, sort_keys=True)}"`. The payload must be
            what `json.dumps` accepts. For a new producer, prefer the default: it also distinguishes "a:b"
            and "c" from "a" and "b:c".

    Raises:
        OutboxError: content that `emit` refuses, or members whose names cannot be sorted, such as 1 and "a";
            with "sha256-32" also a UUID, a time or a Decimal in the payload.
    """
    # OpenSSL takes longer to load than all of the writer.
    from hashlib import sha256

    names = [name("aggregate_id", aggregate_id), name("event_type", event_type)]
    if style == "sha256":
        if isinstance(payload, BytesPayload):
            payload = json.loads(payload.text())
        parts = [*map(_CANONICAL, names), to_json("payload", payload, _CANONICAL)]
        return sha256(f"[{','.join(parts)}]".encode()).hexdigest()
    if style != "sha256-32":
        raise OutboxError(f"style is {style!r}: give sha256 or sha256-32")
    for column, value in ("aggregate_id", aggregate_id), ("event_type", event_type):
        if isinstance(value, Enum):
            # In an f-string it is a member's name or its value, as the version of Python has it.
            raise OutboxError(f"{column} is an enum: convert it to the text that the other producer writes")
    text = to_json("payload", payload, _OF_GUIDES)
    return sha256(":".join([*names, text]).encode()).hexdigest()[:32]


def _plain_only(value: object) -> object:
    raise TypeError(
        f"a {type(value).__qualname__} has no JSON form in json.dumps: convert it to the text that the other "
        "producer writes"
    )


_CANONICAL: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), default=jsonable
).encode
# As json.dumps(payload, sort_keys=True), except NaN and Infinity, which emit refuses.
_OF_GUIDES: Final = json.JSONEncoder(sort_keys=True, allow_nan=False, default=_plain_only).encode
