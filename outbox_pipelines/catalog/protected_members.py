"""Members of an event type that are encrypted with the key of a data subject; see `subject_keys`.

Invariants:
- An encrypted value is a text: only a member that may be any text fits its schema before and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox_pipelines.catalog.schemas import followed

AGGREGATE_ID: Final = "aggregate_id"
_ITEMS: Final = "[]"
_KINDS: Final = ("string", ["string", "null"], ["null", "string"])
# What a text can have beside its type, and an encrypted one fits.
_WORDS: Final = frozenset(
    {
        *("type", "title", "description", "$comment", "examples", "default", "deprecated"),
        *("readOnly", "writeOnly", "minLength"),
    }
)


def check(protected: Mapping[str, str], schema: dict[str, Any] | None) -> None:
    """Raise `ValueError` unless each path is that of a plain text, and has its subject in the payload."""
    for path, subject in protected.items():
        found = _member(schema or {}, path)
        if found is None:
            raise ValueError(
                f"protected {path} is not in its schema: correct the path, or describe the member"
            )
        kind, more = found.get("type"), sorted(found.keys() - _WORDS)
        if kind not in _KINDS:
            raise ValueError(f"protected {path} has the type {kind!r}: an encrypted value is a string")
        if more:
            raise ValueError(
                f"protected {path} has {more[0]} in its schema, which no encrypted value fits: remove it"
            )
        if subject == AGGREGATE_ID:
            continue
        if _member(schema or {}, subject) is None:
            raise ValueError(
                f"protected {path} names the subject {subject}, which is not in its schema: write the path "
                "of a member, or aggregate_id"
            )
        inside = subject.rpartition(_ITEMS)[0]
        if subject in protected or (inside and not path.startswith(f"{inside}{_ITEMS}.")):
            raise ValueError(
                f"protected {path} cannot have the subject {subject}: name a member in clear, in the same "
                "item or outside of lists"
            )


def _member(root: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the schema of the member of a path, such as ``lines[].name``; None if there is none."""
    schema: Any = root
    found: dict[str, Any] = root
    for step in path.split("."):
        name = step.removesuffix(_ITEMS)
        schema = followed(root, schema)
        schema = (
            followed(root, (schema.get("properties") or {}).get(name)) if isinstance(schema, dict) else None
        )
        if step != name and isinstance(schema, dict):
            schema = followed(root, schema.get("items"))
        if not isinstance(schema, dict):
            return None
        found = schema
    return found
