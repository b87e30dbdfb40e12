"""What a new version of the event catalog breaks, and for whom.

Invariants:
- A change that narrows a schema breaks writers: what they write, and what is archived, may not fit any more.
  One that widens it breaks consumers: they may receive what they do not know.
- A part of a schema that cannot be compared counts as both: better a question than a consumer that stops.
- A member that is added is no change for consumers, unless the old schema forbids other members.
- A schema of a new version breaks no writer if the new catalog lists the old version, unchanged: what is
  written, and what is archived, has that version's schema.

The rules are those that schema registries call BACKWARD (narrows) and FORWARD (widens), with members that
neither version describes taken for absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from outbox_pipelines.catalog.document import Catalog, EventType
from outbox_pipelines.catalog.schemas import followed

Whom = Literal["writers", "consumers"]
_WRITERS: Final = frozenset[Whom]({"writers"})
_CONSUMERS: Final = frozenset[Whom]({"consumers"})
_BOTH: Final = _WRITERS | _CONSUMERS
_NO_ONE: Final = frozenset[Whom]()
_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
# Keywords of which a larger value allows less, or more.
_LEAST: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
# They say nothing about which payloads fit.
_WORDS: Final = frozenset(
    {
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly"),
    }
)
_COMPARED: Final = frozenset(
    {"type", "enum", "const", "required", "properties", "additionalProperties", "items", *_LEAST, *_MOST}
)
_ANYTHING: Final[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class TypeChange:
    """A difference of an event type."""

    event_type: str
    what: str
    """The place and what is different there."""
    breaks: frozenset[Whom] = _NO_ONE
    whom: tuple[str, ...] = field(default=(), compare=False)
    """Services that it breaks, as far as the catalog names them."""


def changes(old: Catalog, new: Catalog) -> list[TypeChange]:
    """Return what is different, by event type in the order of the new catalog; removed types come last."""
    names = [*new.events, *(name for name in old.events if name not in new.events)]
    return [change for name in names for change in _of_type(name, old.events.get(name), new.events.get(name))]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the places in which two schemas differ, and what is different there."""
    return [(place, what) for place, what, _ in _Schemas(old, new).differences()]


def _of_type(name: str, old: EventType | None, new: EventType | None) -> Iterator[TypeChange]:
    if old is None:
        yield TypeChange(name, "added")
        return
    if new is None:
        is_over = old.lifecycle == "retired"
        yield _change(name, old, "removed", _NO_ONE if is_over else _BOTH)
        return
    if new.lifecycle != old.lifecycle:
        breaks = _BOTH if new.lifecycle == "retired" and old.lifecycle == "active" else _NO_ONE
        yield _change(name, old, f"lifecycle: {old.lifecycle} → {new.lifecycle}", breaks)
    for entry in ("topic", "aggregate_type", "aggregate_id", "version", "deliver_after"):
        before, after = getattr(old, entry), getattr(new, entry)
        if before != after:
            # What was not documented may be as it is documented now. A version's number breaks no one.
            breaks = _CONSUMERS if before and entry not in ("version", "deliver_after") else _NO_ONE
            yield _change(name, old, f"{entry}: {before} → {after}", breaks)
    if new.protobuf != old.protobuf:
        yield _change(name, old, "protobuf: `outbox catalog register --check` compares it", _NO_ONE)
    yield from _of_versions(name, old, new)
    given = old.payload or {}, new.payload or {}
    kept = new.versions.get(old.version or 0)
    is_kept = kept is not None and not _Schemas(given[0], kept).differences()
    for place, what, breaks in _Schemas(*given).differences():
        yield _change(name, old, f"payload{place}: {what}", breaks - _WRITERS if is_kept else breaks)


def _of_versions(name: str, old: EventType, new: EventType) -> Iterator[TypeChange]:
    """Yield what is different in the schemas of earlier versions, which events of the archive have."""
    before, after = _by_version(old), _by_version(new)
    for version in sorted(before.keys() | after.keys()):
        if version not in after:
            # Without any earlier version, the schema is that of all.
            if version != old.version or new.versions:
                yield _change(name, old, f"version {version}: removed", _WRITERS)
        elif version not in before:
            if version != new.version:
                yield _change(name, old, f"version {version}: added", _NO_ONE)
        elif version in old.versions or version in new.versions:
            for place, what, breaks in _Schemas(before[version], after[version]).differences():
                yield _change(name, old, f"version {version}: payload{place}: {what}", breaks)


def _by_version(documented: EventType) -> dict[int, dict[str, Any]]:
    return {
        each.version: each.payload or {} for each in documented.each_version() if each.version is not None
    }


def _change(name: str, old: EventType, what: str, breaks: frozenset[Whom]) -> TypeChange:
    whom = [old.producer] if "writers" in breaks else []
    return TypeChange(name, what, breaks, (*whom, *(old.consumers if "consumers" in breaks else ())))


_Difference = tuple[str, str, frozenset[Whom]]


class _Schemas:
    """The schemas of one payload, before and after."""

    def __init__(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        self._old = old
        self._new = new
        self._seen: set[tuple[str, str]] = set()

    def differences(self) -> list[_Difference]:
        return list(self._compared("", self._old, self._new))

    def _compared(self, place: str, old: Any, new: Any) -> Iterator[_Difference]:
        old, new = followed(self._old, old), followed(self._new, new)
        # `true` allows everything and `false` nothing.
        old, new = (_ANYTHING if each is True else each for each in (old, new))
        if not (isinstance(old, dict) and isinstance(new, dict)):
            if old != new:
                is_wider = old is False
                yield place, "allowed" if is_wider else "not allowed", _CONSUMERS if is_wider else _WRITERS
            return
        pair = json.dumps(old, sort_keys=True), json.dumps(new, sort_keys=True)
        # A schema that contains itself.
        if pair in self._seen:
            return
        self._seen.add(pair)
        yield from self._values(place, old, new)
        yield from self._limits(place, old, new)
        yield from self._members(place, old, new)
        yield from self._compared(f"{place}[]", old.get("items", _ANYTHING), new.get("items", _ANYTHING))
        for keyword in sorted((old.keys() | new.keys()) - _WORDS - _COMPARED - {"$ref"}):
            if (before := old.get(keyword)) != (after := new.get(keyword)):
                breaks = _WRITERS if before is None else _CONSUMERS if after is None else _BOTH
                # These hold schemas: one more of them may allow more or less.
                is_plain = keyword in ("pattern", "format", "multipleOf", "uniqueItems")
                yield place, f"{keyword} is different", breaks if is_plain else _BOTH

    def _values(self, place: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[_Difference]:
        before, after = _types(old), _types(new)
        if before != after:
            yield place, f"type: {_shown(old)} → {_shown(new)}", _set_breaks(before, after)
        allowed = _allowed(old), _allowed(new)
        if allowed[0] != allowed[1]:
            said = " → ".join("any" if each is None else ", ".join(sorted(each)) for each in allowed)
            yield place, f"allowed values: {said}", _set_breaks(*allowed)

    def _limits(self, place: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[_Difference]:
        for keywords, none in ((_LEAST, -math.inf), (_MOST, math.inf)):
            for keyword in keywords:
                before, after = old.get(keyword, none), new.get(keyword, none)
                if before != after:
                    is_narrower = (after > before) == (none < 0)
                    said = " → ".join("none" if each == none else str(each) for each in (before, after))
                    yield place, f"{keyword}: {said}", _WRITERS if is_narrower else _CONSUMERS

    def _members(self, place: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[_Difference]:
        had, has = set(old.get("required", ())), set(new.get("required", ()))
        for name in sorted(has - had):
            yield f"{place}.{name}", "is required now", _WRITERS
        for name in sorted(had - has):
            yield f"{place}.{name}", "is not required any more", _CONSUMERS
        before, after = old.get("properties", {}), new.get("properties", {})
        others = old.get("additionalProperties", True), new.get("additionalProperties", True)
        for name in [*after, *(name for name in before if name not in after)]:
            at = f"{place}.{name}"
            if name in before and name in after:
                yield from self._compared(at, before[name], after[name])
            elif name in after:
                yield at, "added", _CONSUMERS if others[0] is False else _NO_ONE
            else:
                yield at, "removed", _WRITERS if others[1] is False else _NO_ONE
        yield from self._compared(f"{place}.*", *others)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    given = schema.get("type", _TYPES)
    found = frozenset([given] if isinstance(given, str) else given)
    return found | {"integer"} if "number" in found else found


def _shown(schema: dict[str, Any]) -> str:
    given = schema.get("type", "any")
    return given if isinstance(given, str) else " or ".join(given)


def _allowed(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the values that are allowed, as JSON; None for any."""
    if "const" in schema:
        return frozenset({json.dumps(schema["const"], ensure_ascii=False, sort_keys=True)})
    if "enum" in schema:
        return frozenset(json.dumps(each, ensure_ascii=False, sort_keys=True) for each in schema["enum"])
    return None


def _set_breaks(before: frozenset[str] | None, after: frozenset[str] | None) -> frozenset[Whom]:
    """Return whom it breaks that other values are allowed; None stands for all."""
    is_narrower = after is not None and (before is None or not before <= after)
    is_wider = before is not None and (after is None or not after <= before)
    return (_WRITERS if is_narrower else _NO_ONE) | (_CONSUMERS if is_wider else _NO_ONE)
