"""The file that OUTBOX_CATALOG_FILE names: what is documented of each event type.

Invariants:
- A catalogue that exists is whole: every schema is there, is a JSON Schema, and refers to nothing outside of
  itself, so that nothing is ever fetched to check a payload.
- Whether the table agrees with it, `comparison` says.
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
from outbox_pipelines.errors import SetupError
from outbox_pipelines.parsers.topics import is_topic
from outbox_pipelines.settings import Settings

Lifecycle = Literal["proposed", "active", "deprecated", "retired"]


class EventType(BaseModel):
    """What is documented of one event type."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    description: str = Field(min_length=1)
    """What has happened when such an event is written; Markdown."""
    producer: str = Field(min_length=1)
    """The service that writes it."""
    owner: str = Field(min_length=1)
    """Whom to ask: an e-mail address, ``team:name``, or any text."""
    consumers: tuple[str, ...] = ()
    topic: str | None = None
    """Where it goes; None: by OUTBOX_TOPIC and OUTBOX_TOPIC_MAP_FILE."""
    lifecycle: Lifecycle = "active"
    retired_on: date | None = None
    """From this UTC day on a retired type is not written; None: any row of it is one too many."""
    # Not `schema`: that name belongs to pydantic.
    payload: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON Schema of its payload; None: any payload will do."""

    @field_validator("topic")
    @classmethod
    def _topic_is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not is_topic(value):
            raise ValueError("a topic's name has 1 to 249 of the characters a-z A-Z 0-9 . _ -")
        return value

    @model_validator(mode="after")
    def _has_a_day_when_retired(self) -> EventType:
        if self.retired_on is not None and self.lifecycle != "retired":
            raise ValueError("has retired_on, but its lifecycle is not retired: write lifecycle: retired")
        return self

    @property
    def required(self) -> list[str]:
        """The members that a payload must have."""
        return list((self.payload or {}).get("required", ()))


class Catalog(BaseModel):
    """All event types, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: dict[str, EventType]


def require_catalog(settings: Settings) -> Catalog:
    """The catalogue that OUTBOX_CATALOG_FILE names, read anew.

    Raises:
        SetupError: none is named, or it has a mistake.
    """
    if settings.catalog_file is None:
        raise SetupError(
            "no catalogue is named: set OUTBOX_CATALOG_FILE to a YAML file that documents the event types, "
            "see docs/catalog.md"
        )
    try:
        return read_catalog(settings.catalog_file)
    except ValueError as error:
        raise SetupError(f"OUTBOX_CATALOG_FILE={settings.catalog_file}: {error}") from None


def read_catalog(path: Path) -> Catalog:
    """The catalogue in a file; `ValueError` that names the entry and says how to mend it where it is none."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({error}): name a YAML file that documents event types") from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({' '.join(str(error).split())}): see docs/catalog.md") from None
    events = content.get("events") if isinstance(content, dict) else None
    if not isinstance(events, dict) or not events:
        raise ValueError("documents nothing: write events: and below it each event type with its entries")
    content = content | {"events": {name: _with_schema(path, name, each) for name, each in events.items()}}
    try:
        return Catalog.model_validate(content)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def _with_schema(path: Path, name: str, entry: Any) -> Any:
    """The entry with its schema, which may lie in a file beside the catalogue."""
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
        raise ValueError(f"{name}: schema is no mapping: write a JSON Schema, such as type: object")
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"{name}: schema: {error}") from None
    return entry | {"schema": schema}


_KNOWN: Final = ", ".join(field.alias or name for name, field in EventType.model_fields.items())
_REMEDIES: Final = {
    "missing": "is missing: add it",
    "extra_forbidden": f"is not known: there are {_KNOWN}",
    "string_too_short": "is empty: write what it is",
    "string_type": "is no text: write it in quotes",
    "tuple_type": "is no list: write it as [billing, shipping]",
    "date_from_datetime_parsing": "is no day: write it as 2026-11-21",
    "model_type": f"is no mapping: write entries below it: {_KNOWN}",
}


def _one_line(error: ValidationError) -> str:
    """The first problem: where it is, and what helps."""
    problem = error.errors(include_url=False)[0]
    _, *place = problem["loc"] if problem["loc"][0] == "events" else ("", *problem["loc"])
    if problem["type"] == "value_error" and len(place) == 1:
        return f"{place[0]}: {problem['msg'].removeprefix('Value error, ')}"
    where = ": ".join([str(place[0]), " ".join(map(str, place[1:]))] if place[1:] else [str(place[0])])
    if problem["loc"][0] != "events":
        return f"{where} is not known: there is events: alone"
    remedy = _REMEDIES.get(problem["type"])
    if remedy is None:
        said = problem["msg"].removeprefix("Value error, ")
        remedy = f"is {problem['input']!r}: {said[0].lower()}{said[1:]}"
    return f"{where} {remedy}"
