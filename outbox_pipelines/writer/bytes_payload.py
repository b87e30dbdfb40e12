"""Payloads that are bytes already, such as a message of Protobuf: the value in Kafka, unchanged.

The row has them as JSON, so they pass the table, the archive and other languages:

    {"outbox-bytes": {"base64": "CAU=", "content-type": "application/x-protobuf"}}

Invariants:
- What has this member at its top is bytes, or is refused: it is never published as JSON. In a `json` column
  of an existing table, a name with an escaped letter, which no usual encoder writes, is another one.
- Messages never have the content.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Final, NamedTuple

from outbox_pipelines.writer.errors import OutboxError

_MEMBER: Final = "outbox-bytes"
QUOTED: Final = f'"{_MEMBER}"'
"""In the text of each such payload: where every nanosecond counts, this is asked first."""
# jsonb has no other spelling.
_BEGINNING: Final = f"{{{QUOTED}"
_SHAPE: Final = {_MEMBER: {"base64", "content-type"}}
_CONTENT_TYPE: Final = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+ *(;[ -~]*)?", re.ASCII)
_LONGEST: Final = 200
# No number is too long for it.
_parse: Final = json.JSONDecoder(parse_int=str, parse_float=str).decode


class BytesPayload(NamedTuple):
    """A payload for `emit` that is bytes already, at most 1,000,000 of them: consumers get these bytes.

    The relay decodes them; Debezium in its place sends the JSON that the row has.
    """

    content: bytes
    content_type: str
    """Such as ``application/x-protobuf``; a header of the message."""

    def text(self) -> str:
        """Return the row's payload, as JSON.

        Raises:
            OutboxError: the content is no bytes, or the content type none of bytes.
        """
        if not isinstance(self.content, bytes):
            raise OutboxError(f"the content of a BytesPayload is a {type(self.content).__name__}: give bytes")
        if why := _objection(self.content_type):
            raise OutboxError(f"the content type of a BytesPayload {why}")
        inner = {"base64": base64.b64encode(self.content).decode(), "content-type": self.content_type}
        return json.dumps({_MEMBER: inner})


def is_bytes(text: str) -> bool:
    """Return whether a payload has the reserved member: `read_bytes` reads or refuses it.

    jsonb sorts members by their length, so others can come before it.
    """
    if QUOTED not in text:
        return False
    if text.startswith(_BEGINNING):
        return True
    try:
        payload = _parse(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return isinstance(payload, dict) and _MEMBER in payload


def read_bytes(text: str) -> BytesPayload:
    """Return the bytes of a payload of which `is_bytes`; base64 may have line breaks.

    Raises:
        ValueError: it has another shape, is not base64, or its content type is none of bytes.
    """
    try:
        payload: Any = json.loads(text)
        inner = payload[_MEMBER]
        if {_MEMBER: inner.keys()} != _SHAPE or payload.keys() != _SHAPE.keys():
            raise KeyError
        encoded, content_type = "".join(inner["base64"].split()), inner["content-type"]
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f'its payload has the member "{_MEMBER}" and is not '
            f'{{"{_MEMBER}": {{"base64": "…", "content-type": "application/x-protobuf"}}}}'
        ) from None
    if why := _objection(content_type):
        raise ValueError(f'the content type in "{_MEMBER}" {why}')
    try:
        return BytesPayload(base64.b64decode(encoded, validate=True), content_type)
    except ValueError:
        raise ValueError(f'the text in "{_MEMBER}" is not base64') from None


def is_json_text(content_type: str) -> bool:
    """Return whether content of this type is JSON text."""
    name = content_type.partition(";")[0].strip().lower()
    return name in ("application/json", "text/json") or name.endswith("+json")


def _objection(content_type: object) -> str | None:
    if not isinstance(content_type, str) or not _CONTENT_TYPE.fullmatch(content_type):
        return "is not valid: give one such as application/x-protobuf"
    if len(content_type) > _LONGEST:
        return f"has {len(content_type):,} characters, more than {_LONGEST}"
    return "is that of JSON: pass the parsed JSON as the payload" if is_json_text(content_type) else None
