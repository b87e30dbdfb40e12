"""Idempotency keys derived from an event's content."""

from __future__ import annotations

import json
from typing import Final

from outbox_pipelines.writer.content import name
from outbox_pipelines.writer.encoding import jsonable, to_json


def derive_key(aggregate_id: object, event_type: str, payload: object) -> str:
    """Return a key that events with equal content share: 64 hex digits, equal in every process and release.

    The payload counts as JSON: the order of members does not matter, 1 and 1.0 differ.

    The key also merges two intended events with the same content: 5 paid twice into one account, a door
    opened again, a state that returns. In such cases add a distinguishing member to the payload
    (the payment's id, a version, the time), or use a key of the request. The aggregate type is not part of
    the key: if ids repeat across types, the event types must differ.

    Raises:
        OutboxError: content that `emit` refuses, or members whose names cannot be sorted, such as 1 and "a".
    """
    # OpenSSL takes longer to load than all of the writer.
    from hashlib import sha256

    names = [name("aggregate_id", aggregate_id, any_kind=True), name("event_type", event_type)]
    return sha256(to_json("payload", [*names, payload], _CANONICAL).encode()).hexdigest()


_CANONICAL: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), default=jsonable
).encode
