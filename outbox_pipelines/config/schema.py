"""The JSON Schema of `outbox.toml`, for editors, and the first file, for a person."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import BaseModel

from outbox_pipelines.config.file import MAY_BE_PLAIN, SECRET, entry_names
from outbox_pipelines.config.kafka_config import REASONS
from outbox_pipelines.config.rules import Rule
from outbox_pipelines.config.sections import RULES, SECTIONS, WHOLE
from outbox_pipelines.config.table_mapping import COLUMNS, ORDERS, STATES

SCHEMA_NAME: Final = "outbox.schema.json"
_REFERENCE: Final[list[dict[str, Any]]] = [
    {
        "type": "object",
        "properties": {kind: {"type": "string"}},
        "required": [kind],
        "additionalProperties": False,
    }
    for kind in ("env", "file")
]
_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_TEXTS: Final[dict[str, Any]] = {"type": "array", "items": _TEXT, "minItems": 1}


def _table(entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": entries, "additionalProperties": False, **more}


_WHOLE: Final[dict[str, dict[str, Any]]] = {
    # A name with dots is a table in a table.
    "kafka": {
        "properties": dict.fromkeys(sorted(REASONS), False),
        "additionalProperties": {"$ref": "#/$defs/KafkaEntry"},
    },
    "table": _table(
        {
            "name": _TEXT,
            "order": {"enum": list(ORDERS)},
            "aggregate_type": _TEXT,
            "slot": _TEXT,
            "columns": _table(dict.fromkeys(COLUMNS, _TEXT)),
            "status": _table(dict.fromkeys(STATES, _TEXT)),
        },
        required=["name"],
    ),
    "consumers": {
        "additionalProperties": _table(
            {
                **dict.fromkeys(("source", "group", "schema"), _TEXT),
                "dsn": {"anyOf": [_TEXT, *_REFERENCE]},
                **dict.fromkeys(("topics", "event_types"), _TEXTS),
                "handles_others": {"type": "boolean"},
                "keep_days": {"type": "integer", "minimum": 1},
            }
        )
    },
}
_KAFKA_ENTRY: Final[dict[str, Any]] = {
    "type": ["string", "number", "boolean", "object"],
    "additionalProperties": {"$ref": "#/$defs/KafkaEntry"},
}


def json_schema() -> dict[str, Any]:
    """Return the schema: each section with its entries, their types, limits, defaults and descriptions."""
    definitions: dict[str, Any] = {"KafkaEntry": _KAFKA_ENTRY}
    sections: dict[str, Any] = {}
    for section, model in SECTIONS.items():
        sections[section] = _section(section, model, definitions)
    for section, name in WHOLE.items():
        info = next(model.model_fields[name] for model in SECTIONS.values() if name in model.model_fields)
        sections[section] = {"type": "object", "description": info.description, **_WHOLE.get(section, {})}
        if section in RULES:
            # A text is a topic.
            rule = [{"type": "string"}, {"$ref": "#/$defs/Rule"}]
            sections[section]["additionalProperties"] = {"anyOf": rule}
            definitions["Rule"] = Rule.model_json_schema()
    own = {key: value for key, value in sections["outbox"]["properties"].items() if key != "name"}
    outbox = {
        "type": "object",
        "description": "One of several outboxes: the entries of [outbox], and sections of its own.",
        # `kafka = "…"` is an entry, and `[outboxes.NAME.kafka]` a section.
        "properties": own | sections | {"kafka": {"anyOf": [own["kafka"], sections["kafka"]]}},
        "additionalProperties": False,
    }
    outboxes = {
        "type": "object",
        "description": "Several outboxes, by name: lower-case letters, digits and _.",
        "patternProperties": {"^[a-z][a-z0-9_]{0,39}$": outbox},
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "outbox.toml",
        "type": "object",
        "properties": sections | {"outboxes": outboxes},
        "additionalProperties": False,
        "$defs": definitions,
    }


def _section(section: str, model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    found = model.model_json_schema(by_alias=False)
    definitions.update(found.pop("$defs", {}))
    properties = {}
    for key, name in entry_names(section).items():
        entry = found["properties"][name]
        if name in SECRET:
            plain = [{"type": "string"}] if name in MAY_BE_PLAIN else []
            entry = {"anyOf": [*plain, *_REFERENCE], "description": entry["description"]}
        properties[key] = {each: value for each, value in entry.items() if each != "title"}
    return {
        "type": "object",
        "description": f"{model.__doc__}",
        "properties": properties,
        "additionalProperties": False,
    }


def first_file(values: dict[str, dict[str, Any]]) -> str:
    """Return a file with these values, by section, and all other settings as comments with their defaults."""
    lines = [
        f"#:schema {SCHEMA_NAME}",
        "# Settings that are not written have these defaults. `outbox config check` shows mistakes.",
    ]
    for section, model in SECTIONS.items():
        lines += ["", f"[{section}]"]
        given = values.get(section, {})
        for key, name in entry_names(section).items():
            if key in given:
                lines.append(f"{key} = {literal(given[key])}")
            elif name in SECRET:
                lines.append(f'# {key} = {{ env = "{key.upper()}" }}')
            else:
                default = model.model_fields[name].default
                lines.append(f"# {key} = {'' if default is None else literal(default)}".rstrip())
    lines += ["", *(f"# [{section}]" for section in WHOLE)]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {literal(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)
