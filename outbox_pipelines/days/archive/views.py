"""Views of an archive: one for each event type that the event catalog describes.

Invariants:
- A member of a payload is a column of the type that its JSON Schema names, nested ones in structs and lists;
  a value that is not of that type is NULL there, and stays in `payload`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from outbox_pipelines.catalog.document import Catalog
from outbox_pipelines.catalog.schemas import followed
from outbox_pipelines.days.archive.rendering import quoted

_DEEPEST: Final = 5
_TEXTS: Final = {"date-time": "TIMESTAMPTZ", "date": "DATE", "uuid": "UUID"}
_OTHERS: Final = {"integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}


def of_catalog(catalog: Catalog, columns: Iterable[str]) -> Iterator[str]:
    """Yield a CREATE VIEW for each event type with members.

    Args:
        columns: those of `events`; a member with such a name gets the suffix `_`.
    """
    views, known = {"events", "latest"}, {name.casefold() for name in columns}
    for event_type, documented in catalog.events.items():
        structure = _structure(documented.payload or {}, documented.payload or {}, 0)
        if not isinstance(structure, dict):
            continue
        taken = {*known}
        members = [f"__members.{quoted(name)} AS {quoted(_free(name, taken))}" for name in structure]
        form, name = json.dumps(structure).replace("'", "''"), event_type.replace("'", "''")
        yield (
            f"CREATE VIEW {quoted(_free(event_type, views))} AS "
            f"SELECT * EXCLUDE (__members), {', '.join(members)} FROM ("
            f"SELECT *, json_transform(payload, '{form}') AS __members "
            f"FROM events WHERE event_type = '{name}')"
        )


def _free(name: str, taken: set[str]) -> str:
    """Return the name with as many `_` as make it a new one: DuckDB's names are case-insensitive."""
    while name.casefold() in taken:
        name += "_"
    taken.add(name.casefold())
    return name


def _structure(root: dict[str, Any], schema: Any, depth: int) -> Any:
    """Return the types of a value in the form that json_transform takes."""
    schema = followed(root, schema)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return "JSON"
    kind = schema.get("type", "object" if "properties" in schema else None)
    if isinstance(kind, list):
        (kind, *others) = [each for each in kind if each != "null"] or [None]
        if others:
            return "JSON"
    if kind == "object" and (members := schema.get("properties")):
        # A struct cannot tell them apart.
        if len({name.casefold() for name in members}) < len(members):
            return "JSON"
        return {name: _structure(root, each, depth + 1) for name, each in members.items()}
    if kind == "array" and isinstance(schema.get("items"), dict):
        return [_structure(root, schema["items"], depth + 1)]
    if kind == "string" or (kind is None and all(isinstance(each, str) for each in schema.get("enum", [0]))):
        return _TEXTS.get(schema.get("format", ""), "VARCHAR")
    return _OTHERS.get(str(kind), "JSON")
