"""The event that a handler gets, and how it is read from a message of Kafka.

All value shapes of the relay are read, also framed with the id of their schema, and those of Debezium's event
router.

Invariants:
- What many handlers do not ask for (payload, headers, timestamp) is made when it is first asked for.
- Headers have priority; the value is parsed only if they are incomplete, or mark it as a CloudEvent.
- A message that is not an event is an error, and never skipped.
- A topic can have foreign messages: any content results in an event or an `UnreadableError`.
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, cast
from uuid import UUID

from confluent_kafka import Message

from outbox_pipelines.config.message_names import REPLAY, REPLAY_ID, REPLAYED_AT
from outbox_pipelines.consumer.errors import UnreadableError
from outbox_pipelines.consumer.event_values import (
    CONTENT_TYPE,
    framed,
    is_cloudevent,
    is_envelope,
    json_of,
    parsed,
)
from outbox_pipelines.consumer.kafka_messages import as_time, described, headers_of
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer.references import MEMBER, Reference, is_json, reference_of

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # `Event` alone is `Event[Any]`.
    Payload = TypeVar("Payload", covariant=True, default=Any)
else:
    from typing import TypeVar

    Payload = TypeVar("Payload", covariant=True)

# An id that is written as PostgreSQL and str() write a UUID: it needs no parsing.
_CANONICAL: Final = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch
# For what is no UUID: the same parts always give the same one.
NAMESPACE: Final = UUID("5d1b7c1e-3a54-5c0e-9b61-0d2f6c1f8a77")
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
_MEMBER: Final = MEMBER.encode()
# How texts begin that stand for encrypted and erased values; see `subject_keys`.
_PROTECTED: Final = b'"outbox-e'
# Its letters can be written as \u006f.
_ESCAPED: Final = b"\\u00"
# Headers that have one name everywhere.
_FIXED: Final = (CONTENT_TYPE, *REPLAY)
_CLOUDEVENT: Final = "application/cloudevents+json"


@dataclass(frozen=True, slots=True)
class Replay:
    """Which replay has published an event again: see `outbox replay`."""

    id: UUID
    at: datetime
    """When the message was published again, UTC; the event itself is as it was."""

    def _identity(self, event_id: UUID) -> UUID:
        """Return the UUID that identifies an event within this replay.

        If the replay's id is of version 7, this one contains its time: the record is kept as long as that of
        a new event.
        """
        named = uuid.uuid5(self.id, str(event_id))
        if self.id.version != 7:
            return named
        return UUID(int=self.id.int >> 80 << 80 | 7 << 76 | named.int & ~(-1 << 76))


@dataclass(frozen=True, kw_only=True)
class Event(Generic[Payload]):
    """One message of a topic of events.

    A handler whose first parameter is annotated with `Event[OrderPlaced]` gets an `OrderPlaced` as payload.
    """

    id: str
    type: str
    """Such as ``order.placed``; empty if neither headers nor value have it."""
    aggregate_type: str | None
    aggregate_id: str | None
    """Such as the order's number; by default the message's key."""
    value: bytes | None
    """As it was in Kafka; None: a tombstone."""
    headers: Mapping[str, str | None]
    """All of them, by their names in Kafka."""
    idempotency_key: str | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    version: int | None
    topic: str
    partition: int
    offset: int
    timestamp: datetime
    """When the message was written to Kafka, UTC."""
    replay: Replay | None = None
    """None, but for an event that was published again by a replay."""
    content_type: str | None = None
    """Of the value, if it has one: where that is not JSON, the payload is bytes."""

    @classmethod
    def _read(
        cls, members: dict[str, Any], headers: Sequence[tuple[str, bytes | None]], sent_ms: int
    ) -> Event[Any]:
        """Return an event with these members; it converts headers and timestamp when they are asked for."""
        event = object.__new__(cls)
        members["_late"] = headers, sent_ms
        # A call for each of them, as a frozen dataclass makes, would cost more than all the rest.
        object.__setattr__(event, "__dict__", members)
        return event

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only for what is not there yet.
            if name not in ("headers", "timestamp") or "_late" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            pairs, sent_ms = self.__dict__["_late"]
            if name == "timestamp":
                made = as_time(sent_ms)
            else:
                # The first header of a name.
                made = {header: as_text(raw) for header, raw in reversed(pairs)}
                made = {header: made[header] for header, _ in pairs}
            self.__dict__[name] = made
            return made

    @property
    def payload(self) -> Payload:
        """The body, parsed when it is first asked for and taken out of an envelope, a CloudEvent or a frame.

        None for a tombstone; bytes where the content type is not JSON. In the shape `flat` it has the members
        that the relay adds.

        Raises:
            ValueError: the value is not JSON, or JSON that is nested too deeply for Python.
        """
        # Not a cached_property: until Python 3.12 it takes a lock for each event.
        known = self.__dict__
        if "payload" not in known:
            try:
                known["payload"] = parsed(self)
            except ValueError as error:
                if self._framed is None:
                    raise
                raise ValueError(f"{error}: for Avro or Protobuf, pass registry=SchemaRegistry(…)") from None
        return cast(Payload, known["payload"])

    @property
    def _framed(self) -> tuple[bytes, bytes] | None:
        """The frame and the body of a value with a schema; None for one without."""
        return framed(self.value, self.headers)

    @property
    def _may_be_protected(self) -> bool:
        """Whether the value, in JSON, may have encrypted or erased members."""
        return self.value is not None and (_PROTECTED in self.value or _ESCAPED in self.value)

    @property
    def reference(self) -> Reference | None:
        """Where the body of a large payload is; None if the body is in the message.

        Raises:
            ValueError: the value is not JSON, or has a reference that is not valid.
        """
        if self.value is None or _MEMBER not in self.value:
            return None
        return reference_of(parsed(self))

    def _with_body(self, content: bytes, content_type: str) -> Event[Any]:
        """Return the event as if its body had been in the message; bytes if it is not JSON.

        Raises:
            ValueError: the body is not JSON.
        """
        if not is_json(content_type):
            other = self._with_payload(content)
            other.__dict__["content_type"] = content_type
            return other
        try:
            body = json.loads(content)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        # Those that the relay adds in the shape `flat`.
        added = {name: value for name, value in parsed(self).items() if name != MEMBER}
        return self._with_payload({**body, **added} if added and isinstance(body, dict) else body)

    def _with_payload(self, payload: object) -> Event[Any]:
        """Return the same event with another payload."""
        other = copy.copy(self)
        other.__dict__["payload"] = payload
        return other

    def _identity(self, origin: str, *, by_key: bool) -> UUID:
        """Return the UUID that identifies the event in `processed_events`.

        That is the id where it is a UUID: there is only one such event. Another id, such as 1, is one of its
        origin's, and so is an idempotency key: they become a UUID (version 5) of both.

        Args:
            origin: where the event comes from: the topic, or the name that it has in `origins`.
            by_key: the idempotency key counts instead of the id, where the event has one.

        A replayed event has another identity: it is handled once per replay.
        """
        original = self._original(origin, by_key=by_key)
        return original if self.replay is None else self.replay._identity(original)

    def _original(self, origin: str, *, by_key: bool) -> UUID:
        if by_key and self.idempotency_key is not None:
            return _named("idempotency-key", origin, self.idempotency_key)
        return self._uuid or _named("id", origin, self.id)

    def _identified(self, origin: str, *, by_key: bool) -> tuple[str, UUID | None]:
        """Return `_identity` as text, and `_content`."""
        if self.replay is None and _CANONICAL(self.id) and not (by_key and self.idempotency_key is not None):
            return self.id, None
        return str(self._identity(origin, by_key=by_key)), self._content(by_key=by_key)

    def _content(self, *, by_key: bool) -> UUID | None:
        """Return a digest of what the event says, for an id that its origin may use again; otherwise None.

        Of other replayed events it is the replay's id, so that their records differ from those of new
        events. The digest is the same in every shape of the value: a repetition after a change of
        OUTBOX_VALUE_FORMAT is one.
        """
        if self._uuid or (by_key and self.idempotency_key is not None):
            return None if self.replay is None else self.replay.id
        about = (self.type, self.aggregate_type, self.aggregate_id)
        try:
            return _named("content", *about, self.payload)
        except (ValueError, TypeError, RecursionError):
            # No JSON: the bytes count.
            return _named("content", *about, (self.value or b"").hex())

    @cached_property
    def _uuid(self) -> UUID | None:
        # 32 decimal digits are a number with leading zeros.
        if self.id.isdecimal():
            return None
        try:
            return UUID(self.id)
        except ValueError:
            return None

    def __str__(self) -> str:
        place = f"{self.topic}, partition {self.partition}, offset {self.offset}"
        return f"{self.type or 'event'} {self.id} ({place})"


def as_text(raw: str | bytes | None) -> str | None:
    """Return a header's value or a key as text; bytes that are not UTF-8 are kept as surrogates."""
    return raw.decode(errors="surrogateescape") if isinstance(raw, bytes) else raw


def _named(*parts: object) -> UUID:
    return uuid.uuid5(NAMESPACE, json.dumps(parts, sort_keys=True))


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
        for ours, theirs in (*self._names.items(), *zip(_FIXED, _FIXED, strict=True)):
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
            raise UnreadableError(f"{described(message)} cannot be read: {type(error).__name__}") from error

    def _read(self, message: Message) -> Event:
        pairs = headers_of(message)
        found = _NOTHING.copy()
        is_ascii = True
        # Backwards: the relay's headers come first, and the first header of a name is used.
        for header, raw in reversed(pairs):
            for name in self._ours.get(header, ()):
                # Not by `as_text`: this is done for each header of each event.
                text = raw.decode("utf-8", "surrogateescape") if isinstance(raw, bytes) else raw
                found[name] = text
                is_ascii = is_ascii and (text is None or text.isascii())
        value = message.value()
        content_type = found.pop(CONTENT_TYPE, None)
        replay_id, replayed_at = found.pop(REPLAY_ID, None), found.pop(REPLAYED_AT, None)
        if (content_type and content_type.startswith(_CLOUDEVENT)) or not (
            found["id"] and found["event-type"] and found["aggregate-type"]
        ):
            try:
                said = _members_of(value, found["id"])
            except RecursionError:
                raise UnreadableError(
                    f"{described(message)} cannot be read: its JSON is nested too deeply"
                ) from None
            found = {name: header or said.get(name) for name, header in found.items()}
            is_ascii = False
        if not (event_id := found["id"]):
            raise UnreadableError(
                f"{described(message)} is not an event: it has no header {self._names['id']!r} and its value "
                "is neither an envelope nor a CloudEvent"
            )
        for name, text in () if is_ascii else found.items():
            if text and not is_unicode(text):
                raise UnreadableError(
                    f"{described(message)} is not an event: its header {self._names[name]!r} is not UTF-8"
                )
        version = found["version"]
        replay = None if replay_id is None else _replay(message, replay_id, replayed_at)
        return Event._read(
            {
                "replay": replay,
                "content_type": content_type,
                "id": event_id,
                "type": found["event-type"] or "",
                "aggregate_type": found["aggregate-type"],
                "aggregate_id": found["aggregate-id"] or as_text(message.key()),
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


def _replay(message: Message, replay_id: str, at: str | None) -> Replay:
    try:
        return Replay(UUID(replay_id), datetime.fromisoformat(at or "").astimezone(UTC))
    except ValueError:
        raise UnreadableError(
            f"{described(message)} is not an event: its header {REPLAY_ID} is not a UUID, or its header "
            f"{REPLAYED_AT} is not a time"
        ) from None


def is_unicode(text: str) -> bool:
    """Return whether a text has no surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _members_of(value: bytes | None, event_id: str | None) -> dict[str, str]:
    """Return what a value of a known shape says about its event; nothing for a value of no shape."""
    try:
        body: Any = json.loads(json_of(value or b"null"))
    except ValueError:
        return {}
    said: dict[str, Any] = {}
    if is_cloudevent(body):
        said = {ours: body.get(theirs) for ours, theirs in _ATTRIBUTES.items()}
    elif is_envelope(body):
        said = {name: body[name.replace("-", "_")] for name in _NAMES[1:4]} | {"id": body["event_id"]}
    elif isinstance(body, dict) and event_id:
        # `flat`; without the header `id` it might be anything.
        said = {name: body.get(name.replace("-", "_")) for name in ("event-type", "idempotency-key")}
    return {name: str(part) for name, part in said.items() if isinstance(part, str | int)}


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
