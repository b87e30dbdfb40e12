"""Register the schemas of the event catalog in a schema registry, or say what it would refuse; their files.

Invariants:
- Everything is checked before anything is registered: an incompatible schema leaves the registry unchanged.
  Only a version behind one that is not registered yet is compared when it is registered.
- What the registry has already stays: a second registration changes nothing, and finds the same ids.
- A file is what a registry has (`subjects.document`), with an `$id` that names type and version. Two event
  types, or versions, never share a file.
- Files of versions that are not documented any more stay. A file of a version that is documented with
  another schema is different.
- An earlier version that is registered behind a newer one becomes the latest of its subject: it is said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

from outbox_pipelines.catalog.asyncapi import part_name
from outbox_pipelines.catalog.changes import differences
from outbox_pipelines.catalog.document import SCHEMA_ID, Catalog, EventType
from outbox_pipelines.catalog.subjects import Subjects, document
from outbox_pipelines.registry import Latest, Registry, Subject

_LATE: Final = (
    "a newer version of the type is registered already: behind it, this one is the latest of its subject, "
    "for compatibility and for clients that use the latest"
)


@dataclass(frozen=True, slots=True)
class Registered:
    """What became of an event type's schema, or would."""

    event_type: str
    """Of an earlier version, as ``order.placed@1``."""
    subject: str
    """Empty if the type has none."""
    status: Literal["unchanged", "registered", "new", "compatible", "unchecked", "incompatible", "missing"]
    schema_id: int | None = None
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether events of the type could not be published with their schema."""
        return self.status in ("incompatible", "missing")


def check(registry: Registry, subjects: Subjects) -> list[Registered]:
    """Return what a registration would do; change nothing.

    Raises:
        UnavailableError: the registry does not answer.
        SetupError: it refuses.
    """
    results: list[Registered] = []
    behind: set[str] = set()
    for name, subject in subjects.of_event_types.items():
        result = _checked(registry, name, subject, is_behind=subject.name in behind)
        results.append(result)
        if name != subject.event_type and result.status != "unchanged":
            behind.add(subject.name)
    newer: set[str] = set()
    for n, result in reversed([*enumerate(results)]):
        if result.status == "unchanged":
            newer.add(result.subject)
        elif result.subject in newer:
            results[n] = replace(result, why="; ".join(filter(None, (result.why, _LATE))))
    return [*results, *(Registered(name, "", "missing", why=why) for name, why in subjects.missing.items())]


def register(registry: Registry, subjects: Subjects, compatibility: str) -> list[Registered]:
    """Register what the registry does not have yet, if `check` finds nothing wrong; return what was done.

    Args:
        compatibility: of subjects that have none of their own.

    Raises:
        UnavailableError: the registry does not answer.
        SetupError: it refuses.
    """
    results = check(registry, subjects)
    if any(result.is_wrong for result in results):
        return results
    for n, result in enumerate(results):
        if result.status != "unchanged":
            schema_id = registry.register(subjects.of_event_types[result.event_type], compatibility)
            results[n] = replace(result, status="registered", schema_id=schema_id)
    return results


def _checked(registry: Registry, name: str, subject: Subject, *, is_behind: bool) -> Registered:
    schema_id = registry.find(subject)
    if schema_id is not None:
        return Registered(name, subject.name, "unchanged", schema_id)
    if is_behind:
        return Registered(name, subject.name, "unchecked")
    latest = registry.latest(subject)
    if latest is None:
        return Registered(name, subject.name, "new")
    is_compatible = registry.is_compatible(subject)
    if is_compatible is not False:
        return Registered(name, subject.name, "compatible" if is_compatible else "unchecked")
    level = registry.compatibility(subject) or "the registry's default"
    why = f"not compatible ({level}) with version {latest.version}: {_different(latest, subject)}"
    return Registered(name, subject.name, "incompatible", why=why)


def _different(latest: Latest, subject: Subject) -> str:
    """Return what is different, in our words: of the registry's, each has others, or none."""
    if subject.kind == "AVRO":
        from outbox_pipelines.catalog import avro_schemas

        return "; ".join(avro_schemas.differences(latest.text, subject.text)) or "look at both schemas"
    if subject.kind == "PROTOBUF":
        return "compare the files; its log, or an attempt to register it, says more"
    try:
        old: Any = json.loads(latest.text)
    except ValueError:
        return "that version is no JSON Schema"
    if not isinstance(old, dict):
        return "that version is no JSON Schema of an object"
    found = [f"payload{place}: {what}" for place, what in differences(old, json.loads(subject.text))]
    return "; ".join(found) or "look at both schemas"


def files(catalog: Catalog) -> dict[str, str]:
    """Return the text of each file by its name; retired types, and those without a schema, have none."""
    return {
        _file(event_type, each): _text(event_type, each)
        for _, event_type, each in catalog.each_version()
        if each.payload is not None and each.lifecycle != "retired"
    }


def different(directory: Path, found: dict[str, str]) -> list[str]:
    """Return the names of files that a directory does not have, or has with another schema."""
    return [name for name, text in found.items() if _read(directory / name) != text]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _file(event_type: str, each: EventType) -> str:
    name = part_name(event_type)
    # No name has an @.
    return f"{name}@{each.version}.json" if each.version else f"{name}.json"


def _text(event_type: str, each: EventType) -> str:
    schema = json.loads(document(event_type, each.payload or {}))
    version = f":{each.version}" if each.version else ""
    # A reference within the schema stays one: it refers to the document, whatever its name is.
    named = {"$id": f"{SCHEMA_ID}{quote(event_type, safe='')}{version}", **schema}
    return json.dumps(named, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
