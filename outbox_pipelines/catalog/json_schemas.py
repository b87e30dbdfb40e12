"""The JSON Schemas of the event catalog as files, one for each event type and version.

Invariants:
- A file is what a schema registry has (`subjects.document`), with an `$id` that names type and version.
- Files of versions that are not documented any more stay. A file of a version that is documented with
  another schema is different.
- Two event types, or versions, never share a file.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

from outbox_pipelines.catalog.asyncapi import part_name
from outbox_pipelines.catalog.document import SCHEMA_ID, Catalog, EventType
from outbox_pipelines.catalog.subjects import document


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
