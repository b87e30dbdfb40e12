"""What a consumer sees of an event: value and headers. The key is always the aggregate's id.

Invariants:
- Pure: the same event always gives the same message.
- The payload goes into the value as PostgreSQL prints it, or in Avro's or Protobuf's form: numbers are exact.
- A payload that is bytes is the value, unchanged, whatever shape and format the settings choose.
- The row's own headers come behind the relay's and never replace them, whatever those are called: consumers
  deduplicate by `id`. Case does not count, since some readers do not tell `ID` from `id`.
- The message of a replayed event is the original one, and the marks of the replay.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from outbox_pipelines.config import parsed
from outbox_pipelines.config.message_names import (
    COLUMNS,
    CONTENT_TYPE,
    IDEMPOTENCY_KEY,
    METADATA,
    REPLAY,
    USUAL,
)
from outbox_pipelines.config.rules import has_rules, of_types, own
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.misfits import MisfitError
from outbox_pipelines.settings import MessageSettings
from outbox_pipelines.writer.bytes_payload import QUOTED, BytesPayload, is_bytes, read_bytes
from outbox_pipelines.writer.references import MEMBER, reference_of

# As confluent-kafka types them; every value here is a str.
Headers = list[tuple[str, str | bytes | None]]
Metadata = dict[str, Any]
Value = str | bytes | None
Encode = Callable[[Event], tuple[Value, Headers]]
# A value of an event and its metadata.
Shape = Callable[[Event, Metadata], str]

# Those of columns that are never null.
_COLUMNS: Final = {name: attrgetter(name.replace("-", "_")) for name in COLUMNS}
_MEMBERS: Final = {
    "event_id": attrgetter("id"),
    **{name: attrgetter(name) for name in ("event_type", "aggregate_type", "aggregate_id")},
}
# A writer may invent types.
_MOST_TYPES: Final = 10_000
# Where Confluent's clients look for the id, before they look for it in the value.
_SCHEMA_ID: Final = "__value_schema_id"
_MEMBER: Final = f'"{MEMBER}"'
# Of JSON, around the payload of an existing table whose column is json or text: it comes as it was stored.
_SPACE: Final = " \t\n\r"
_TOO_DEEP: Final = "its JSON is nested too deeply for the relay to read: flatten it"


class EncodingError(ValueError):
    """The event does not fit the shape that was chosen."""


class UnregisteredError(EncodingError):
    """The schema of an event's type is not registered yet."""


class Schema(NamedTuple):
    """A schema and its id in the schema registry."""

    id: int
    text: str
    imports: Mapping[str, str] = {}
    """Of Protobuf: the texts of the files that it needs, by their paths."""
    message: str = ""
    """Of Protobuf: the full name of the message."""


# The schema of events of an aggregate type, an event type, and a version if that matters.
SchemaOf = Callable[[str, str, str | None], Schema]


class Encoder:
    """Events as messages, in the shape and with the header names of the settings.

    Args:
        schema_of: gives the schemas that values are framed with; needed where `is_framed`.
        versioned: event types of which each version has a schema of its own.
        marks: headers of replayed events; their values may change from one event to the next.

    Attributes:
        encode: gives value and headers of an event, None as the value of a tombstone; `EncodingError` where
            the event does not fit. Chosen once: it is called 200,000 times a second.
    """

    encode: Encode

    def __init__(
        self,
        settings: MessageSettings,
        schema_of: SchemaOf | None = None,
        versioned: Container[str] = (),
        marks: Mapping[str, str] | None = None,
    ) -> None:
        by_types = has_rules(settings) or is_framed(settings)
        given = marks or {}
        encode = _by_types(settings, schema_of, versioned, given) if by_types else _encode(settings, given)
        self.encode = encode if marks is None else _marked(encode, marks)


def is_framed(settings: MessageSettings) -> bool:
    """Whether values of any type have a format with a schema."""
    of_event_types, of_aggregate_types = own(settings, "format")
    return {settings.format, *of_event_types.values(), *of_aggregate_types.values()} != {"json"}


def needs_time(settings: MessageSettings) -> bool:
    """Whether a shape has the event's time in it, so that the source must read it."""
    return not {"envelope", "cloudevents"}.isdisjoint(_formats(settings))


def needs_json(settings: MessageSettings) -> bool:
    """Whether a payload must be JSON: it is a part of a JSON value, or the format says that it is JSON."""
    return _formats(settings) != {"payload"} or is_framed(settings)


def _formats(settings: MessageSettings) -> set[str]:
    of_event_types, of_aggregate_types = own(settings, "value_format")
    return {settings.value_format, *of_event_types.values(), *of_aggregate_types.values()}


def _marked(encode: Encode, marks: Mapping[str, str]) -> Encode:
    """The same with headers that mark a replay."""

    def marked(event: Event) -> tuple[Value, Headers]:
        value, headers = encode(event)
        headers += marks.items()
        return value, headers

    return marked


def _by_types(
    settings: MessageSettings,
    schema_of: SchemaOf | None,
    versioned: Container[str],
    marks: Mapping[str, str],
) -> Encode:
    """Each pair of types in the shape and the format that its rules choose."""

    @lru_cache(_MOST_TYPES)
    def of(aggregate_type: str, event_type: str, has_bytes: bool, version: str | None) -> Encode:
        chosen = of_types(settings, aggregate_type, event_type)
        encode = _encode(chosen, marks)
        if chosen.format == "json" or has_bytes:
            return encode
        assert schema_of is not None, "who encodes a format with a schema gives its schemas"
        schema = schema_of(aggregate_type, event_type, version)
        index = b""
        if chosen.format == "avro":
            encode = _avro(encode, schema.text)
        elif chosen.format == "protobuf":
            encode, index = _protobuf(encode, schema)
        return _framed(encode, schema.id, index, in_header=chosen.registry_framing == "header")

    def encode(event: Event) -> tuple[Value, Headers]:
        _, _, aggregate_type, _, event_type, payload, metadata = event
        version = _version(metadata) if metadata is not None and event_type in versioned else None
        return of(aggregate_type, event_type, is_bytes(payload), version)(event)

    return encode


def _version(metadata: str) -> str | None:
    try:
        found = _read_metadata(metadata).get("version")
    except RecursionError:
        raise EncodingError(_TOO_DEEP) from None
    return None if found is None else _text(found)


def _avro(encode: Encode, schema: str) -> Encode:
    """The same in Avro's binary form."""
    # It needs a package that others do not have.
    from outbox_pipelines.formats.avro.encoding import writer

    return _converted(encode, writer(schema))


def _protobuf(encode: Encode, schema: Schema) -> tuple[Encode, bytes]:
    """The same in Protobuf's binary form, and the index of the message in its file."""
    from outbox_pipelines.formats.protobuf.descriptors import message_of
    from outbox_pipelines.formats.protobuf.encoding import index_of, writer

    descriptor = message_of(schema.text, schema.imports, schema.message)
    return _converted(encode, writer(descriptor)), index_of(descriptor)


def _converted(encode: Encode, write: Callable[[str], bytes]) -> Encode:
    """The same with the value as this function writes it, but for a tombstone and a reference."""

    def converted(event: Event) -> tuple[Value, Headers]:
        value, headers = encode(event)
        if value is None or _is_reference(event.payload):
            return value, headers
        try:
            return write(event.payload), headers
        except MisfitError as error:
            raise EncodingError(str(error)) from None

    return converted


def _framed(encode: Encode, schema_id: int, index: bytes, *, in_header: bool) -> Encode:
    """The same with the id of its schema. A tombstone has none, nor a reference: the schema is the body's.

    Args:
        index: which message of the schema it is; empty but for Protobuf.
    """
    frame = struct.pack(">bI", 0, schema_id) + index

    def with_header(event: Event) -> tuple[Value, Headers]:
        value, headers = encode(event)
        if value is None or _is_reference(event.payload):
            return value, headers
        return value, [*headers, (_SCHEMA_ID, frame)]

    def with_prefix(event: Event) -> tuple[Value, Headers]:
        value, headers = encode(event)
        if value is None or _is_reference(event.payload):
            return value, headers
        return frame + (value.encode() if isinstance(value, str) else value), headers

    return with_header if in_header else with_prefix


def _is_reference(payload: str) -> bool:
    """Return whether a payload is the reference to a large one."""
    if _MEMBER not in payload:
        return False
    try:
        return reference_of(json.loads(payload)) is not None
    except (ValueError, RecursionError):
        return False


def _encode(settings: MessageSettings, marks: Mapping[str, str]) -> Encode:
    names = parsed.header_names(settings)
    usual = list(names)[:3] == list(USUAL[:3]) and "aggregate-id" not in names
    if settings.value_format == "payload" and usual and not settings.tombstones:
        return _plain(names, settings)
    return _shaped(names, settings, marks)


def _plain(names: dict[str, str], settings: MessageSettings) -> Encode:
    """The payload as it is: the shape that must cost nothing."""
    id_name, event_type_name, aggregate_type_name = list(names.values())[:3]
    more = _more(names, settings)

    def encode(event: Event) -> tuple[Value, Headers]:
        _, event_id, aggregate_type, _, event_type, payload, metadata = event
        headers: Headers = [
            (id_name, event_id),
            (event_type_name, event_type),
            (aggregate_type_name, aggregate_type),
        ]
        value: Value = payload
        if QUOTED in payload and is_bytes(payload):
            value, content_type = _bytes(payload)
            headers.append((CONTENT_TYPE, content_type))
        if metadata is not None:
            try:
                headers += more(_read_metadata(metadata))
            except RecursionError:
                raise EncodingError(_TOO_DEEP) from None
        return value, headers

    return encode


def _shaped(names: dict[str, str], settings: MessageSettings, marks: Mapping[str, str]) -> Encode:
    """Any shape and any set of headers."""
    shapes: dict[str, Shape] = {
        "payload": lambda event, _: event.payload,
        "flat": _flat(parsed.flat_members(settings)),
        "envelope": _envelope,
        "cloudevents": _cloudevent(settings.cloudevents_source, marks),
    }
    shape = shapes[settings.value_format]
    columns = [(theirs, _COLUMNS[ours]) for ours, theirs in names.items() if ours in _COLUMNS]
    is_cloudevent = settings.value_format == "cloudevents"
    more = _more(names, settings)
    about_value: Headers = [(CONTENT_TYPE, "application/cloudevents+json")] if is_cloudevent else []
    tombstones = settings.tombstones

    def encode(event: Event) -> tuple[Value, Headers]:
        headers: Headers = [(name, column(event)) for name, column in columns]
        try:
            metadata = {} if event.metadata is None else _read_metadata(event.metadata)
            if tombstones and event.payload.strip(_SPACE) == "null":
                return None, headers + more(metadata)
            if is_bytes(event.payload):
                content, content_type = _bytes(event.payload)
                return content, [*headers, (CONTENT_TYPE, content_type), *more(metadata)]
            return shape(event, metadata), headers + about_value + more(metadata)
        except RecursionError:
            raise EncodingError(_TOO_DEEP) from None

    return encode


def _bytes(payload: str) -> BytesPayload:
    try:
        return read_bytes(payload)
    except ValueError as error:
        raise EncodingError(str(error)) from None


def _more(names: dict[str, str], settings: MessageSettings) -> Callable[[Metadata], Headers]:
    """The headers of the metadata: what the row has of ours, then its own."""
    ours = {name: names[name] for name in METADATA if name in names}
    reserved = {name.lower() for name in (*_COLUMNS, *METADATA, *REPLAY, CONTENT_TYPE, *names.values())}
    if settings.format != "json":
        reserved.add(_SCHEMA_ID)
    # A header ce_… makes readers take the message for the other way to write a CloudEvent.
    prefixes = ("dead-letter-", "ce_") if settings.value_format == "cloudevents" else ("dead-letter-",)

    def is_free(name: str) -> bool:
        name = name.lower()
        return name not in reserved and not name.startswith(prefixes)

    def headers(metadata: Metadata) -> Headers:
        found: Headers = [(ours[name], _text(value)) for name, value in metadata.items() if name in ours]
        if own := metadata.get("headers"):
            found += [(name, _text(value)) for name, value in own.items() if is_free(name)]
        return found

    return headers


def _flat(names: dict[str, str]) -> Shape:
    """The body with members about the event in it; they win over what the body calls so."""
    columns = [(name, _MEMBERS[ours]) for ours, name in names.items() if ours in _MEMBERS]
    key_name = names.get(IDEMPOTENCY_KEY)

    def shape(event: Event, metadata: Metadata) -> str:
        body = event.payload.strip(_SPACE)
        if not body.startswith("{"):
            raise EncodingError("OUTBOX_VALUE_FORMAT=flat needs a payload that is a JSON object")
        added = {_quote(name): _quote(column(event)) for name, column in columns}
        if key_name and "idempotency-key" in metadata:
            added[_quote(key_name)] = _quote(metadata["idempotency-key"])
        if not added:
            return body
        if any(name in body for name in added):
            own = ((_quote(name), value) for name, value in _read(body).items())
            body = (
                "{" + ", ".join(f"{name}: {_json(value)}" for name, value in own if name not in added) + "}"
            )
        members = ", ".join(f"{name}: {value}" for name, value in added.items())
        rest = body[1:].lstrip(_SPACE)
        return f"{{{members}}}" if rest == "}" else f"{{{members}, {rest}"

    return shape


def _envelope(event: Event, metadata: Metadata) -> str:
    """The payload beside what identifies it; its time is in the form that every parser of ISO 8601 reads."""
    time = f"{_time(metadata).removesuffix('Z')}+00:00"
    return (
        f'{{"event_id": {_quote(event.id)}, "event_type": {_quote(event.event_type)}, '
        f'"aggregate_type": {_quote(event.aggregate_type)}, "aggregate_id": {_quote(event.aggregate_id)}, '
        f'"payload": {event.payload}, "timestamp": {_quote(time)}}}'
    )


def _time(metadata: Metadata) -> str:
    """Return the time of the event: a row of an existing table may have none, or an infinite one."""
    try:
        return str(metadata["created-at"])
    except KeyError:
        raise EncodingError(
            "this OUTBOX_VALUE_FORMAT needs created_at, and the row has no time in it"
        ) from None


def _cloudevent(source: str, marks: Mapping[str, str]) -> Shape:
    """CloudEvents 1.0, structured: attributes and data in one object; no name of an attribute has a dash."""
    start = f'{{"specversion": "1.0", "source": {_quote(source)}, "datacontenttype": "application/json"'

    def shape(event: Event, metadata: Metadata) -> str:
        attributes = {
            "id": event.id,
            "type": event.event_type,
            "subject": event.aggregate_id,
            "time": _time(metadata),
            "aggregatetype": event.aggregate_type,
            "partitionkey": event.aggregate_id,
        }
        for name in METADATA:
            # An attribute is absent or has a value: never empty.
            if metadata.get(name):
                attributes[name.replace("-", "")] = metadata[name]
        attributes |= {name.replace("-", ""): value for name, value in marks.items()}
        tracestate = metadata.get("headers", {}).get("tracestate")
        if isinstance(tracestate, str) and tracestate and "traceparent" in attributes:
            attributes["tracestate"] = tracestate
        members = "".join(f', "{name}": {_json(value)}' for name, value in attributes.items())
        return f'{start}{members}, "data": {event.payload}}}'

    return shape


class _Number(str):
    """A JSON number as it was written: a float would lose digits, and Python refuses very long integers."""

    __slots__ = ()


_decoder: Final = json.JSONDecoder(parse_float=_Number, parse_int=_Number)
_read: Final[Callable[[str], Any]] = _decoder.decode
_quote: Final[Callable[[object], str]] = json.JSONEncoder(ensure_ascii=False).encode


def _read_metadata(text: str) -> Metadata:
    """Read metadata, which has no space around it: `decode` would look for some, in twice the time."""
    metadata: Metadata = _decoder.raw_decode(text)[0]
    return metadata


def _text(value: object) -> str:
    """A header's value: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else _json(value)


def _json(value: object) -> str:
    """What `_read` has read, written as PostgreSQL writes it."""
    if isinstance(value, _Number):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quote(name)}: {_json(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return _quote(value)
