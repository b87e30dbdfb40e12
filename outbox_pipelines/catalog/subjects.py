"""What a schema registry has of the event catalog: the subject of each event type, and the document in it.

Invariants:
- The document is the schema of the event catalog with `$schema` and `title`: some registries refuse one
  without the former, and clients take the latter for the name of the record. With Avro it is derived.
- The text of a document depends on what it says, not on the order of its members in the file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.catalog.document import Catalog, EventType
from outbox_pipelines.config.rules import Router, of_types
from outbox_pipelines.errors import SetupError
from outbox_pipelines.registry import Subject
from outbox_pipelines.settings import MessageSettings

if TYPE_CHECKING:
    from outbox_pipelines.formats.protobuf.descriptors import File

_DRAFT_7: Final = "http://json-schema.org/draft-07/schema#"
_DRAFT_2020_12: Final = "https://json-schema.org/draft/2020-12/schema"
# What draft 7 does not have, or reads in another way.
_LATER: Final = frozenset(
    {
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "$vocabulary"),
        *("dependentRequired", "dependentSchemas", "maxContains", "minContains", "prefixItems"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
# Beside a reference, which draft 7 reads alone.
_WORDS: Final = frozenset({"$ref", "$comment", "description", "title"})


class Subjects:
    """The subjects of the event types that have a format with a schema.

    Attributes:
        of_event_types: the subject of each type that has one. Of an earlier version it is that of
            ``order.placed@1``, and stands before the newest.
        missing: by the same names, why there is none.
        newest: the newest version of each type that has subjects of earlier ones.

    Raises:
        SetupError: two event types have the same subject.
    """

    def __init__(self, catalog: Catalog, settings: MessageSettings) -> None:
        self._strategy = settings.registry_subjects
        self._router = Router(settings)
        self.of_event_types: dict[str, Subject] = {}
        self.missing: dict[str, str] = {}
        self.newest: dict[str, int | None] = {}
        for name, event_type, each in catalog.each_version():
            own = of_types(settings, each.aggregate_type or "", event_type)
            if each.lifecycle == "retired" or own.format == "json":
                continue
            if name != event_type:
                # A message of Protobuf is that of all versions.
                if own.format == "protobuf":
                    continue
                self.newest[event_type] = catalog.events[event_type].version
            self._add(name, event_type, each, own)
        self._require_one_type_each()

    def name(self, aggregate_type: str, event_type: str) -> str:
        """Return the subject of events of these types; raise `IllegalTopicError` if they have no topic."""
        if self._strategy == "record":
            return event_type
        topic = self._router.topic(aggregate_type, event_type)
        return f"{topic}-value" if self._strategy == "topic" else f"{topic}-{event_type}"

    def _add(self, name: str, event_type: str, each: EventType, own: MessageSettings) -> None:
        if own.format == "protobuf" and each.protobuf is None:
            self.missing[name] = "has no protobuf in the event catalog: add it, with file and message"
        elif own.format != "protobuf" and each.payload is None:
            self.missing[name] = "has no schema in the event catalog: add one"
        elif each.aggregate_type is None and self._strategy != "record" and "{aggregate_type" in own.topic:
            self.missing[name] = (
                "has no aggregate_type in the event catalog: add it, since its subject contains the topic "
                f"{own.topic}"
            )
        else:
            subject = self.name(each.aggregate_type or "", event_type)
            try:
                self.of_event_types[name] = _SUBJECTS[own.format](subject, event_type, each)
            except ValueError as error:
                self.missing[name] = str(error)

    def _require_one_type_each(self) -> None:
        together: dict[str, list[str]] = defaultdict(list)
        for name, subject in self.of_event_types.items():
            if name == subject.event_type:
                together[subject.name].append(name)
        for subject_name, event_types in together.items():
            # A file of Protobuf has many messages.
            if len({self.of_event_types[each].text for each in event_types}) > 1:
                raise SetupError(
                    f"subject {subject_name} would have the schemas of {', '.join(event_types)}: set "
                    "OUTBOX_REGISTRY_SUBJECTS=topic_record, or give each a topic of its own"
                )


def _json_schema(subject: str, event_type: str, each: EventType) -> Subject:
    return Subject(subject, event_type, document(event_type, each.payload or {}))


def _avro(subject: str, event_type: str, each: EventType) -> Subject:
    # It needs a package that others do not have.
    from outbox_pipelines.catalog import avro_schemas

    try:
        return Subject(subject, event_type, avro_schemas.document(event_type, each.payload or {}), "AVRO")
    except avro_schemas.NoEquivalentError as error:
        raise ValueError(f"has no Avro schema: {error}") from None


def _protobuf(subject: str, event_type: str, each: EventType) -> Subject:
    from outbox_pipelines.formats.protobuf import descriptors

    assert each.protobuf is not None
    try:
        file = descriptors.file_of(each.protobuf.file, each.protobuf.message)
    except descriptors.NoMessageError as error:
        raise ValueError(f"has no Protobuf: its file {error}") from None
    return replace(_of_file(file, subject, event_type), message=each.protobuf.message)


def _of_file(file: File, name: str, event_type: str = "") -> Subject:
    imports = tuple(_of_file(each, each.path) for each in file.imports)
    return Subject(name, event_type, file.text, "PROTOBUF", imports)


_SUBJECTS: Final[dict[str, Callable[[str, str, EventType], Subject]]] = {
    "json_schema": _json_schema,
    "avro": _avro,
    "protobuf": _protobuf,
}


def document(event_type: str, schema: dict[str, Any]) -> str:
    """Return the document of an event type, as JSON.

    Registries check compatibility best in draft 7, so it is named where the schema means the same in it.
    """
    draft = _DRAFT_2020_12 if any(_later(schema)) else _DRAFT_7
    return json.dumps({"$schema": draft, **schema, "title": event_type}, sort_keys=True, ensure_ascii=False)


def _later(schema: Any) -> Iterator[bool]:
    if isinstance(schema, dict):
        yield bool(_LATER & schema.keys()) or ("$ref" in schema and not schema.keys() <= _WORDS)
        for key, each in schema.items():
            if key not in _VALUES:
                yield from _later(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _later(each)
