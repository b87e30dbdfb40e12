"""Read the event catalog, the file that OUTBOX_CATALOG_FILE names, and check payloads against it.

Invariants:
- A `Catalog` is complete: every schema exists, is a JSON Schema and has no references outside itself, so
  nothing is fetched to check a payload.
- YAML is read with the types of JSON: no dates, no boolean `on`, no duplicate names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from jsonschema.exceptions import best_match
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from outbox_pipelines.catalog import schemas
from outbox_pipelines.catalog.schemas import check_schema, checker, place
from outbox_pipelines.config.topics import is_topic
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import MessageSettings

SCHEMA_ID: Final = "urn:outbox:"
"""What the `$id` of a file begins with that `outbox catalog schemas` has written."""
Lifecycle = Literal["proposed", "active", "deprecated", "retired"]
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A hundred times the size of a large catalog.
_MOST_CHARACTERS: Final = 10_000_000
_MOST_NODES: Final = 500_000
_DEEPEST: Final = 100
_TOO_DEEP: Final = f"is nested more than {_DEEPEST} deep: flatten it"
_TEXT: Final = "tag:yaml.org,2002:str"
# Messages repeat the value, which can be the whole payload.
_LONGEST: Final = 200


class ProtobufMessage(BaseModel):
    """The message that a payload is where its format is Protobuf."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: bytes
    """A compiled descriptor set with all imports; in the event catalog, the path of its file."""
    message: str = Field(min_length=1)
    """Its full name, such as ``shop.v1.OrderPlaced``."""


def _as_number(name: object) -> object:
    """Return a version that is a name in YAML, and so a text, as a number; 1.0 and 01 stay texts."""
    return int(name) if isinstance(name, str) and re.fullmatch("[1-9][0-9]{0,9}", name) else name


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
    aggregate_id: str | None = None
    """The member of the payload that has the aggregate's id; None: the writer gives it."""
    version: int | None = Field(default=None, ge=1, lt=2**31, strict=True)
    """The version that its events have, and that `payload` is the schema of; None: none."""
    versions: dict[Annotated[int, BeforeValidator(_as_number), Field(ge=1, strict=True)], dict[str, Any]] = (
        Field(default_factory=dict)
    )
    """The JSON Schemas of earlier versions. Without any, `payload` is the schema of all events, whatever
    version they have."""
    deliver_after: timedelta | None = Field(default=None, gt=timedelta(), le=timedelta(3650))
    """How long its events are delayed unless the writer says otherwise; of classes."""
    topic: str | None = None
    """The topic; None: determined by the settings."""
    lifecycle: Lifecycle = "active"
    retired_on: date | None = None
    """From this UTC day on, a retired type must not be written; None: any row of it is an error."""
    protected: dict[str, str] = Field(default_factory=dict)
    """By the path of a member that is encrypted, the path of the member that has its data subject's id, or
    ``aggregate_id``."""
    protobuf: ProtobufMessage | None = None
    # Not `schema`: that name belongs to pydantic.
    payload: dict[str, Any] | None = Field(default=None, alias="schema")
    """The JSON Schema of the payload; None: any payload is valid."""

    @field_validator("topic")
    @classmethod
    def _topic_is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not is_topic(value):
            raise ValueError("a topic name consists of 1 to 249 of the characters a-z A-Z 0-9 . _ -")
        return value

    @field_validator("deliver_after", mode="before")
    @classmethod
    def _delay_names_its_unit(cls, value: object) -> object:
        # pydantic takes a number, and true, for seconds.
        return str(value) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _has_an_id_in_each_payload(self) -> EventType:
        if self.aggregate_id is not None and self.aggregate_id not in (self.payload or {}).get(
            "required", ()
        ):
            raise ValueError(
                f"aggregate_id is {self.aggregate_id!r}: name a member that its schema lists as required"
            )
        return self

    @model_validator(mode="after")
    def _protects_plain_texts(self) -> EventType:
        schemas.check(self.protected, self.payload)
        return self

    @model_validator(mode="after")
    def _has_a_higher_version_than_before(self) -> EventType:
        if self.versions and max(self.versions) >= (self.version or 0):
            raise ValueError(
                f"versions has {max(self.versions)}, and version is {self.version}: give schema a higher one"
            )
        return self

    @model_validator(mode="after")
    def _has_a_day_when_retired(self) -> EventType:
        if self.retired_on is not None and self.lifecycle != "retired":
            raise ValueError("has retired_on, but its lifecycle is not retired: write lifecycle: retired")
        return self

    def each_version(self) -> Iterator[EventType]:
        """Yield the entry as it is for each earlier version, from the first on, and then itself."""
        for version, schema in sorted(self.versions.items()):
            has_id = self.aggregate_id in schema.get("required", ())
            own: dict[str, Any] = {"version": version, "payload": schema, "versions": {}}
            yield self.model_copy(update={**own, "aggregate_id": self.aggregate_id if has_id else None})
        yield self


class Catalog(BaseModel):
    """All event types, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    events: dict[str, EventType]

    @field_validator("events")
    @classmethod
    def _names_no_type_like_a_version(cls, events: dict[str, EventType]) -> dict[str, EventType]:
        for name, each in events.items():
            for version in each.versions:
                if f"{name}@{version}" in events:
                    raise ValueError(f"{name}@{version} is a version of {name}: rename this event type")
        return events

    def each_version(self) -> Iterator[tuple[str, str, EventType]]:
        """Yield each version of each event type, the newest of a type last.

        That is a name, the event type, and its entry: of the newest version the name is the event type, of an
        earlier one ``order.placed@1``.
        """
        for event_type, documented in self.events.items():
            for each in documented.each_version():
                yield event_type if each is documented else f"{event_type}@{each.version}", event_type, each


def require_catalog(settings: MessageSettings) -> Catalog:
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
    """Return the entry with its schema and its descriptors, which can be in separate files."""
    if not isinstance(entry, dict):
        return entry
    named = entry.get("protobuf", {})
    if not isinstance(named, dict):
        raise ValueError(
            f"{name}: protobuf is not a mapping: write {{file: shop.binpb, message: shop.v1.OrderPlaced}}"
        )
    if isinstance(named.get("file"), str):
        try:
            content = (path.parent / named["file"]).read_bytes()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name}: protobuf file {named['file']} cannot be read ({error}): name a compiled descriptor "
                "set, by its path from this one"
            ) from None
        entry = {**entry, "protobuf": {**named, "file": content}}
    if "schema" in entry:
        entry = entry | {"schema": _schema(path, f"{name}: schema", entry["schema"])}
    if isinstance(versions := entry.get("versions"), dict):
        read = {
            version: _schema(path, f"{name}: versions {version}", each) for version, each in versions.items()
        }
        entry = entry | {"versions": read}
    return entry


def _schema(path: Path, what: str, schema: Any) -> dict[str, Any]:
    """Return a schema, which can be in a separate file; `what` begins the message of an error."""
    if isinstance(schema, str):
        try:
            schema = json.loads((path.parent / schema).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{what} {schema} cannot be read ({error}): name a JSON file, by its path from this one, or "
                "write the schema here"
            ) from None
        if isinstance(schema, dict) and str(schema.get("$id")).startswith(SCHEMA_ID):
            # Of `outbox catalog schemas`. The document in a schema registry has none.
            del schema["$id"]
    if not isinstance(schema, dict):
        raise ValueError(f"{what} is not a mapping: write a JSON Schema, such as type: object")
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return schema


_KNOWN: Final = ", ".join(field.alias or name for name, field in EventType.model_fields.items())
_REMEDIES: Final = {
    "missing": "is missing: add it",
    "extra_forbidden": f"is not known: the entries are {_KNOWN}",
    "string_too_short": "is empty: give a value",
    "string_type": "is not a text: write it in quotes",
    "dict_type": "is not a mapping: write 1: and the schema of that version, or the path of its file",
    "tuple_type": "is not a list: write it as [billing, shipping]",
    "date_from_datetime_parsing": "is not a day: write a date such as 2026-11-21",
    "time_delta_parsing": "is not a duration: write PT1H, or P2D",
    "model_type": f"is not a mapping: write entries below it: {_KNOWN}",
}


def _one_line(error: ValidationError) -> str:
    """Return the first problem: its place and the fix."""
    problem = error.errors(include_url=False)[0]
    _, *place = problem["loc"] if problem["loc"][0] == "events" else ("", *problem["loc"])
    # How pydantic marks that the name is wrong, not its value.
    place = [each for each in place if each != "[key]"]
    if problem["type"] == "value_error" and not place:
        return problem["msg"].removeprefix("Value error, ")
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


def parse(text: str) -> Any:
    """Return the parsed text.

    Raises:
        yaml.YAMLError: it is not YAML.
        ValueError: it is too large or nested too deeply, also through its aliases.
        ValueError: it has a duplicate name, of which YAML's parsers would keep the last.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"has {len(text):,} characters: {_MOST_CHARACTERS:,} is the limit")
    loader = _LOADER(text)
    try:
        _require_shallow(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST_NODES:
            raise ValueError(f"has over {_MOST_NODES:,} values with its aliases written out: use fewer")
        _make_texts(node, set())
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    finally:
        loader.dispose()


def _require_shallow(text: str) -> None:
    """Check the depth before nodes are built, because that takes a frame of the C stack for each level."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                raise ValueError(_TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _size(node: Any, known: dict[int, float]) -> float:
    """Return the number of values with all aliases expanded; infinite for a cycle."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []
        parts = node.value if isinstance(node, yaml.SequenceNode) else parts
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _make_texts(node: Any, seen: set[int]) -> None:
    """Make names and dates strings before values are built; aliases can point to an enclosing node."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and not name.tag.endswith(":merge"):
                name.tag = _TEXT
                if name.value in names:
                    line = name.start_mark.line + 1
                    raise ValueError(f"has {name.value} twice, again in line {line}: keep one of them")
                names.add(name.value)
            _make_texts(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _make_texts(value, seen)
    elif node.tag.endswith(":timestamp"):
        node.tag = _TEXT


def compiled(catalog: Catalog, *, refuses_unknown: bool) -> Callable[[str, object, int | None], None]:
    """See `outbox_pipelines.catalog.validator`."""
    checkers = {
        (event_type, each.version): None if each.payload is None else checker(each.payload)
        for _, event_type, each in catalog.each_version()
    }

    def check(event_type: str, payload: object, version: int | None) -> None:
        documented = catalog.events.get(event_type)
        if documented is None:
            if refuses_unknown:
                raise ValueError("event type is not in the event catalog: document it, or correct the name")
            return
        if documented.lifecycle == "retired":
            raise ValueError("this event type is retired: use another one, or change its lifecycle")
        if version is None or not documented.versions:
            version = documented.version
        if (event_type, version) not in checkers:
            raise ValueError(
                f"version {version} is not in the event catalog: add its schema to versions, or correct the "
                "event's version"
            )
        found = checkers[event_type, version]
        if found is None:
            return
        if isinstance(payload, bytes):
            raise ValueError("its payload is bytes, and its schema one of JSON: remove the schema")
        error = best_match(found.iter_errors(payload))
        if error is not None:
            of = f"version {version}: " if documented.versions else ""
            raise ValueError(f"{of}{place(error.absolute_path, 'payload')}: {_short(error.message)}")

    return check


def _short(message: str) -> str:
    """Shorten a message; keep its beginning (the value) and its end (the problem)."""
    half = _LONGEST // 2
    return message if len(message) <= _LONGEST else f"{message[:half]} … {message[-half:]}"
