"""Large payloads: the body is an object in a store, and the event's payload is a reference to it.

The reference is a payload with one reserved member, so it passes every value shape, the archive and other
languages:

    {"outbox-body": {"key": "2026-11-27/8d0c…", "size": 1234567, "sha256": "9f86…", "content-type": "…"}}

Invariants:
- The first part of a key is the UTC day of the event's `created_at`, which is the time of its transaction. A
  closed day accepts no events, so no transaction can refer to an object of that day later.
- A key has no other directories: no reference leads out of the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from outbox_pipelines.writer.json_text import to_json

MEMBER: Final = "outbox-body"
JSON: Final = "application/json"
KEY: Final = re.compile(r"\d{4}-\d\d-\d\d/[0-9A-Za-z][0-9A-Za-z._-]{0,199}", re.ASCII)
"""What the key of a body is."""
_SHA256: Final = re.compile("[0-9a-f]{64}")


class Reference(NamedTuple):
    """Where the body of an event is, and how to verify it."""

    key: str
    """The object's name below the store's URL: the day of the event, a slash and a unique name."""
    size: int
    """In bytes."""
    sha256: str
    """In hexadecimal digits, in lower case."""
    content_type: str = JSON

    def payload(self) -> str:
        """Return the payload of the event, as JSON."""
        named = dict(zip(("key", "size", "sha256", "content-type"), self, strict=True))
        return json.dumps({MEMBER: named})


def reference_of(payload: Any) -> Reference | None:
    """Return the reference that a payload is; None for any other payload.

    Raises:
        ValueError: the payload has the reserved member, but it is not a reference.
    """
    if not isinstance(payload, dict) or MEMBER not in payload:
        return None
    given = payload[MEMBER]
    try:
        key, size, sha256 = given["key"], given["size"], given["sha256"]
        content_type = given.get("content-type", JSON)
        fits = (
            KEY.fullmatch(key)
            and type(size) is int
            and size >= 0
            and _SHA256.fullmatch(sha256)
            and isinstance(content_type, str)
        )
    except (TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(
            f'its member "{MEMBER}" is not a reference: it needs "key" (<yyyy-mm-dd>/<name>), "size" (bytes) '
            'and "sha256" (64 hexadecimal digits in lower case)'
        )
    return Reference(key, size, sha256, content_type)


def is_json(content_type: str) -> bool:
    """Return whether a body is JSON text."""
    return content_type.partition(";")[0].strip().lower() == JSON


class BodyStore(Protocol):
    """What stores bodies: `outbox_pipelines.bodies.Bodies`."""

    def put(self, day: str, bodies: Sequence[Body]) -> list[str]: ...

    async def put_later(self, day: str, bodies: Sequence[Body]) -> list[str]: ...


class LargePayload(NamedTuple):
    """A payload for `emit` whose body may be stored; made by `Bodies.large`."""

    store: BodyStore
    content: Any
    content_type: str
    above: int
    """JSON of up to this many bytes stays in the row."""

    def text(self) -> str:
        """Return the row's payload: JSON text, which is a `Body` if it has to be stored."""
        if isinstance(self.content, bytes):
            return Body("null", self.store, self.content, self.content_type)
        text = to_json("payload", self.content)
        content = text.encode()
        return text if len(content) <= self.above else Body(text, self.store, content, self.content_type)


class Body(str):
    """A row's payload as JSON text, until its body is stored and a reference replaces it."""

    __slots__ = ("content", "content_type", "store")
    store: BodyStore
    content: bytes
    content_type: str

    def __new__(cls, text: str, store: BodyStore, content: bytes, content_type: str) -> Body:
        made = super().__new__(cls, text)
        made.store, made.content, made.content_type = store, content, content_type
        return made

    @property
    def is_json(self) -> bool:
        """Whether the text is the body, and could be in the row."""
        return is_json(self.content_type)
