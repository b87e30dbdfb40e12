"""Read the event catalog, the file that OUTBOX_CATALOG_FILE names.

Invariants:
- A `Catalog` is complete: every schema exists, is a JSON Schema and has no references outside itself, so
  nothing is fetched to check a payload.
- `comparison` compares it with the table.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from outbox_pipelines.catalog.schemas import check_schema
from outbox_pipelines.catalog.yaml_file import parse
from outbox_pipelines.config.topics import is_topic
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

Lifecycle = Literal["proposed", "active", "deprecated", "retired"]


class EventType(BaseModel):
    """The documentation of one event type."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    description: str = Field(min_length=1)
    """What has happened when such an event is written; Markdown."""
    producer: str = Field(min_length=1)
    """The service that writes it."""
    owner: str = Field(min_length=1)
    """Whom to ask: an e-mail address, ``team:name``, or any text."""
    consumers: tuple[str, ...] = ()
    aggregate_type: str | None = None
    """The aggregate type that its events have; None: any."""
    topic: str | None = None
    """The topic; None: determined by OUTBOX_TOPIC and OUTBOX_TOPIC_MAP."""
    lifecycle: Lifecycle = "active"
    retired_on: date | None = None
    """From this UTC day on, a retired type must not be written; None: any row of it is an error."""
    # Not `schema`: that name belongs to pydantic.
    payload: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON Schema of the payload; None: any payload is valid."""

    @field_validator("topic")
    @classmethod
    def _topic_is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not is_topic(value):
            raise ValueError("a topic name consists of 1 to 249 of the characters a-z A-Z 0-9 . _ -")
        return value

    @model_validator(mode="after")
    def _has_a_day_when_retired(self) -> EventType:
        if self.retired_on is not None and self.lifecycle != "retired":
            raise ValueError("has retired_on, but its lifecycle is not retired: write lifecycle: retired")
        return self


class Catalog(BaseModel):
    """All event types, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: dict[str, EventType]


def require_catalog(settings: Settings) -> Catalog:
    """Read and return the event catalog that OUTBOX_CATALOG_FILE names.

    Raises:
        SetupError: the setting is empty, or the file is invalid.
    """
    if settings.catalog_file is None:
        raise SetupError(
            "no event catalog: set OUTBOX_CATALOG_FILE to a YAML file that documents the event types, "
            "see docs/catalog.md"
        )
    try:
        return read_catalog(settings.catalog_file)
    except ValueError as error:
        raise SetupError(f"OUTBOX_CATALOG_FILE={settings.catalog_file}: {error}") from None


def read_catalog(path: Path) -> Catalog:
    """Return the event catalog in a file; raise `ValueError` that names the invalid entry and its fix."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({error}): name a YAML file that documents event types") from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({' '.join(str(error).split())}): see docs/catalog.md") from None
    events = content.get("events") if isinstance(content, dict) else None
    if not isinstance(events, dict) or not events:
        raise ValueError("documents no events: write events: and below it each event type with its entries")
    content = content | {"events": {name: _with_schema(path, name, each) for name, each in events.items()}}
    try:
        return Catalog.model_validate(content)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def _with_schema(path: Path, name: str, entry: Any) -> Any:
    """Return the entry with its schema, which can be in a separate file."""
    if not isinstance(entry, dict) or "schema" not in entry:
        return entry
    schema = entry["schema"]
    if isinstance(schema, str):
        try:
            schema = json.loads((path.parent / schema).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{name}: schema {schema} cannot be read ({error}): name a JSON file, by its path from this "
                "one, or write the schema here"
            ) from None
    if not isinstance(schema, dict):
        raise ValueError(f"{name}: schema is not a mapping: write a JSON Schema, such as type: object")
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"{name}: schema: {error}") from None
    return entry | {"schema": schema}


_KNOWN: Final = ", ".join(field.alias or name for name, field in EventType.model_fields.items())
_REMEDIES: Final = {
    "missing": "is missing: add it",
    "extra_forbidden": f"is not known: the entries are {_KNOWN}",
    "string_too_short": "is empty: give a value",
    "string_type": "is not a text: write it in quotes",
    "tuple_type": "is not a list: write it as [billing, shipping]",
    "date_from_datetime_parsing": "is not a day: write a date such as 2026-11-21",
    "model_type": f"is not a mapping: write entries below it: {_KNOWN}",
}


def _one_line(error: ValidationError) -> str:
    """Return the first problem: its place and the fix."""
    problem = error.errors(include_url=False)[0]
    _, *place = problem["loc"] if problem["loc"][0] == "events" else ("", *problem["loc"])
    if problem["type"] == "value_error" and len(place) == 1:
        return f"{place[0]}: {problem['msg'].removeprefix('Value error, ')}"
    where = ": ".join([str(place[0]), " ".join(map(str, place[1:]))] if place[1:] else [str(place[0])])
    if problem["loc"][0] != "events":
        return f"{where} is not known: the only top-level entry is events:"
    remedy = _REMEDIES.get(problem["type"])
    if remedy is None:
        said = problem["msg"].removeprefix("Value error, ")
        remedy = f"is {problem['input']!r}: {said[0].lower()}{said[1:]}"
    return f"{where} {remedy}"
