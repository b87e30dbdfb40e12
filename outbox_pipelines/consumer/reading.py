"""Read Kafka messages as events: all value shapes of the relay, and those of Debezium's event router.

Invariants:
- Headers have priority; the value is parsed only if they are incomplete, or mark it as a CloudEvent.
- A message that is not an event is an error, and never skipped.
- A topic can have foreign messages: any content results in an event or an `UnreadableError`.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from confluent_kafka import Message

from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event import Event, as_time, existing_ms, is_cloudevent, is_envelope
from outbox_pipelines.consumer.event import as_text as _text
from outbox_pipelines.errors import SetupError

Place = tuple[str, int]
"""Topic and partition."""

_METADATA: Final = ("idempotency-key", "correlation-id", "causation-id", "traceparent", "version")
_NAMES: Final = ("id", "event-type", "aggregate-type", "aggregate-id", *_METADATA)
_NOTHING: Final[dict[str, str | None]] = dict.fromkeys(_NAMES)
# Attributes of a CloudEvent, as the relay writes them.
_ATTRIBUTES: Final = {
    "id": "id",
    "event-type": "type",
    "aggregate-type": "aggregatetype",
    "aggregate-id": "subject",
    **{name: name.replace("-", "") for name in _METADATA},
}
_CONTENT_TYPE: Final = "content-type"
_CLOUDEVENT: Final = "application/cloudevents+json"
# Not `message.headers()`: the client's function fails on a name that is not UTF-8 and returns a list all the
# same. Only a call through here is checked for that by every version of Python.
_headers: Final[Callable[[Message], Any]] = operator.methodcaller("headers")


class Reader:
    """Reads messages whose headers have these names.

    Args:
        names: what headers are called that have another name, as `{"id": "event-id"}`.

    Raises:
        SetupError: there is no such header.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        if unknown := set(names) - set(_NAMES):
            raise SetupError(f"header_names has {min(unknown)!r}: the names are {', '.join(_NAMES)}")
        self._names = {name: names.get(name, name) for name in _NAMES}
        # By the names in Kafka; two of ours can have one header.
        self._ours: dict[str, tuple[str, ...]] = {}
        for ours, theirs in (*self._names.items(), (_CONTENT_TYPE, _CONTENT_TYPE)):
            self._ours[theirs] = (*self._ours.get(theirs, ()), ours)

    def read(self, message: Message) -> Event:
        """Return the event of a message.

        Raises:
            UnreadableError: the message is not an event; the error names its place.
        """
        try:
            return self._read(message)
        except UnreadableError:
            raise
        # Of what others write nothing else may end a consumer: the same message would at each start.
        except (ValueError, OverflowError, RecursionError) as error:
            raise UnreadableError(f"{_place(message)} cannot be read: {type(error).__name__}") from error

    def _read(self, message: Message) -> Event:
        pairs = headers_of(message)
        found = _NOTHING.copy()
        is_ascii = True
        # Backwards: the relay's headers come first, and the first header of a name is used.
        for header, raw in reversed(pairs):
            for name in self._ours.get(header, ()):
                # Not by `_text`: this is done for each header of each event.
                text = raw.decode(errors="surrogateescape") if isinstance(raw, bytes) else raw
                found[name] = text
                is_ascii = is_ascii and (text is None or text.isascii())
        value = message.value()
        content_type = found.pop(_CONTENT_TYPE, None)
        if (content_type and content_type.startswith(_CLOUDEVENT)) or not (
            found["id"] and found["event-type"] and found["aggregate-type"]
        ):
            try:
                told = _told_by_value(value, found["id"])
            except RecursionError:
                raise UnreadableError(
                    f"{_place(message)} cannot be read: its JSON is nested too deeply"
                ) from None
            found = {name: header or told.get(name) for name, header in found.items()}
            is_ascii = False
        if not (event_id := found["id"]):
            raise UnreadableError(
                f"{_place(message)} is not an event: it has no header {self._names['id']!r} and its value is "
                "neither an envelope nor a CloudEvent"
            )
        for name, text in () if is_ascii else found.items():
            if text and not _is_unicode(text):
                raise UnreadableError(
                    f"{_place(message)} is not an event: its header {self._names[name]!r} is not UTF-8"
                )
        version = found["version"]
        return Event.read(
            {
                "id": event_id,
                "type": found["event-type"] or "",
                "aggregate_type": found["aggregate-type"],
                "aggregate_id": found["aggregate-id"] or _text(message.key()),
                "value": value,
                "idempotency_key": found["idempotency-key"],
                "correlation_id": found["correlation-id"],
                "causation_id": found["causation-id"],
                "traceparent": found["traceparent"],
                "version": None if version is None else _number(version),
                "topic": str(message.topic()),
                "partition": message.partition() or 0,
                "offset": message.offset() or 0,
            },
            pairs,
            message.timestamp()[1],
        )


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    """Return the headers of a message, in order; an empty list if a name is not UTF-8."""
    try:
        # As confluent-kafka gives them; its types allow more.
        return _headers(message) or []
    except (SystemError, UnicodeDecodeError):
        # The client keeps an incomplete list; an access to it would crash the process.
        message.set_headers([])
        return []


def sent_at(message: Message) -> datetime:
    """Return the time when a message was written to Kafka, UTC."""
    return as_time(message.timestamp()[1])


def sent_ms(message: Message) -> int:
    """The same in ms since 1970, as a time that there is: a producer may write any number there."""
    return existing_ms(message.timestamp()[1])


def _place(message: Message) -> str:
    return f"the message at {message.topic()}, partition {message.partition()}, offset {message.offset()}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _told_by_value(value: bytes | None, event_id: str | None) -> dict[str, str]:
    """What a value of a known shape tells of its event; a value of no shape tells nothing."""
    try:
        body: Any = json.loads(value or b"null")
    except ValueError:
        return {}
    told: dict[str, Any] = {}
    if is_cloudevent(body):
        told = {ours: body.get(theirs) for ours, theirs in _ATTRIBUTES.items()}
    elif is_envelope(body):
        told = {name: body[name.replace("-", "_")] for name in _NAMES[1:4]} | {"id": body["event_id"]}
    elif isinstance(body, dict) and event_id:
        # `flat`; without the header `id` it might be anything.
        told = {name: body.get(name.replace("-", "_")) for name in ("event-type", "idempotency-key")}
    return {name: str(part) for name, part in told.items() if isinstance(part, str | int)}


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def place_of(message: Any) -> Place:
    """Return the partition of a message."""
    return str(message.topic()), message.partition() or 0
