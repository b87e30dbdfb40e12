"""Idempotency keys that follow from an event's content."""

from __future__ import annotations

import json
from typing import Final

from outbox_pipelines.writer.content import name
from outbox_pipelines.writer.encoding import jsonable, to_json


def derive_key(aggregate_id: object, event_type: str, payload: object) -> str:
    """A key that two events share if they say the same: 64 hex digits, the same in every process and release.

    The payload counts as JSON: the order of members does not matter, 1 and 1.0 differ.

    It merges two events that say the same and are both meant: 5 paid twice into one account, a door opened
    again, a state that comes back. Then put into the payload what tells them apart (the payment's id, a
    version, the time), or take a key of the request. It does not know the aggregate type: where ids repeat
    across types, the event type must differ.

    Raises:
        OutboxError: what `emit` refuses, or members whose names do not sort, as 1 and "a".
    """
    # OpenSSL takes longer to load than all of the writer.
    from hashlib import sha256

    names = [name("aggregate_id", aggregate_id, any_kind=True), name("event_type", event_type)]
    return sha256(to_json("payload", [*names, payload], _CANONICAL).encode()).hexdigest()


_CANONICAL: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"), default=jsonable
).encode
