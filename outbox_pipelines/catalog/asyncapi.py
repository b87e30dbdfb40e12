"""The event catalog as an AsyncAPI 3.0 document, for the tools of platform teams: https://www.asyncapi.com.

Invariants:
- It describes what the relay sends with these settings: topic, key, headers, and the value in its shape.
- The document is complete: a schema's own `$defs` become schemas of the document.
- AsyncAPI's schemas are those of JSON Schema draft 7. What an event's schema has of later drafts stays as it
  is written, and a tool that does not know it ignores it.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from outbox_pipelines.catalog.document import Catalog, EventType
from outbox_pipelines.config import parsed
from outbox_pipelines.config.message_names import COLUMNS, CONTENT_TYPE
from outbox_pipelines.config.rules import Router, of_types
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import MessageSettings

_TEXT: Final = {"type": "string"}
_TIME: Final = {"type": "string", "format": "date-time"}
_ENVELOPE: Final = ("event_id", "event_type", "aggregate_type", "aggregate_id")
_CLOUDEVENT: Final = ("specversion", "source", "id", "type", "subject", "datacontenttype")
# Of a schema what is no schema.
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
# What names of a document's parts consist of.
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]")


def document(catalog: Catalog, settings: MessageSettings, *, version: str) -> dict[str, Any]:
    """Return the document; retired types are not in it.

    Args:
        version: of the document, as its reader sees it.
    """
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    channels: dict[str, Any] = {}
    router = Router(settings)
    for version_name, event_type, each in catalog.each_version():
        if each.lifecycle == "retired":
            continue
        name = part_name(version_name)
        own = of_types(settings, each.aggregate_type or "", event_type)
        schemas |= _schemas(name, each.payload or {})
        messages[name] = _message(event_type, each, own, {"$ref": f"#/components/schemas/{name}"})
        topic = each.topic or (each.aggregate_type and router.topic_or_empty(each.aggregate_type, event_type))
        topic = topic or own.topic.replace(":lower}", "}")
        channel = channels.setdefault(part_name(topic), _channel(topic))
        channel["messages"][name] = {"$ref": f"#/components/messages/{name}"}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"Events of {settings.name}",
            "version": version,
            "description": "Delivered at least once, in order for each key: consumers skip an `id` that they "
            "have handled.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": {
            f"send.{name}": {"action": "send", "channel": {"$ref": f"#/channels/{name}"}} for name in channels
        },
        "components": {"messages": messages, "schemas": schemas},
    }


def part_name(text: str) -> str:
    """Return the text as the name of a part, or of a file: other characters by their number.

    Two texts have two names.
    """
    return _NOT_IN_NAMES.sub(lambda found: f"_{ord(found[0]):x}_", text)


def _channel(topic: str) -> dict[str, Any]:
    channel: dict[str, Any] = {"address": topic, "messages": {}}
    if names := re.findall(r"\{(\w+)\}", topic):
        channel["parameters"] = {name: {"description": f"the event's {name}"} for name in names}
    return channel


def _message(event_type: str, entry: EventType, settings: MessageSettings, payload: Any) -> dict[str, Any]:
    summary, *_ = entry.description.strip().split("\n\n")
    message = {
        "name": event_type,
        "summary": summary,
        "description": entry.description,
        "contentType": "application/json",
        "headers": _headers(event_type, entry.version, settings),
        "payload": _value(payload, settings),
        "bindings": {"kafka": {"key": {**_TEXT, "description": "the id of the aggregate"}}},
        "x-producer": entry.producer,
        "x-owner": entry.owner,
        "x-consumers": list(entry.consumers),
    }
    if settings.value_format == "cloudevents":
        message["contentType"] = "application/cloudevents+json"
    if settings.format == "avro" and entry.payload is not None:
        # It needs a package that others do not have.
        from outbox_pipelines.catalog import avro_schemas

        try:
            schema = json.loads(avro_schemas.document(event_type, entry.payload))
        except avro_schemas.NoEquivalentError as error:
            raise SetupError(f"{event_type} has no Avro schema: {error}") from None
        message["contentType"] = "application/vnd.apache.avro"
        message["payload"] = {
            "schemaFormat": "application/vnd.apache.avro+json;version=1.9.0",
            "schema": schema,
        }
    if settings.format == "protobuf":
        # What describes it is a file of a compiler, which AsyncAPI has no place for.
        message["contentType"] = "application/x-protobuf"
        message.pop("payload")
    if entry.lifecycle != "active":
        message["tags"] = [{"name": entry.lifecycle}]
    return message


def _headers(event_type: str, version: int | None, settings: MessageSettings) -> dict[str, Any]:
    names = parsed.header_names(settings)
    properties: dict[str, Any] = {theirs: dict(_TEXT) for theirs in names.values()}
    properties[names["event-type"]] = {"const": event_type}
    if version is not None and "version" in names:
        properties[names["version"]] = {"const": str(version)}
    if settings.value_format == "cloudevents":
        properties[CONTENT_TYPE] = {"const": "application/cloudevents+json"}
    return {
        "type": "object",
        "required": [theirs for ours, theirs in names.items() if ours in COLUMNS],
        "properties": properties,
    }


def _value(payload: Any, settings: MessageSettings) -> Any:
    if settings.value_format == "flat":
        members = dict.fromkeys(parsed.flat_members(settings).values(), _TEXT)
        return {"allOf": [payload, {"type": "object", "properties": members}]}
    if settings.value_format == "envelope":
        return _object(*_ENVELOPE, payload=payload, timestamp=_TIME)
    if settings.value_format == "cloudevents":
        return _object(*_CLOUDEVENT, time=_TIME, data=payload)
    return payload


def _object(*texts: str, **others: Any) -> dict[str, Any]:
    properties = {**dict.fromkeys(texts, _TEXT), **others}
    return {"type": "object", "required": [*properties], "properties": properties}


def _schemas(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a payload's schema and those that it defines, as schemas of the document."""
    own = {f"{name}.{part_name(key)}": _moved(each, name) for key, each in schema.get("$defs", {}).items()}
    rest = {key: each for key, each in schema.items() if key not in ("$defs", "$schema", "$id")}
    return {name: _moved(rest, name), **own}


def _moved(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: each if key in _VALUES else _moved(each, name) for key, each in schema.items() if key != "$ref"
    }
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return {**found, **({"$ref": reference} if reference is not None else {})}
    to = {"$ref": _moved_reference(reference, name)}
    # In draft 7, what stands beside a reference is ignored.
    return {"allOf": [to, found]} if found else to


def _moved_reference(reference: str, name: str) -> str:
    root, _, rest = reference.removeprefix("#").removeprefix("/").partition("/")
    if root == "$defs":
        key, _, within = rest.partition("/")
        key = key.replace("~1", "/").replace("~0", "~")
        return f"#/components/schemas/{name}.{part_name(key)}" + (f"/{within}" if within else "")
    return f"#/components/schemas/{name}" + (f"/{root}" if root else "") + (f"/{rest}" if rest else "")
