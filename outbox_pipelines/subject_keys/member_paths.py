"""Paths of members of a payload: `customer.email`; `lines[].name`, `emails[]` for each item of a list.

Invariants:
- A path leads to a member of each object that it passes, or is an error that names where it ends: a
  misspelled path never leaves a value in clear. One that ends with `?` may lead to a member that is missing,
  but not through a value that has no members.
- A member that is null stays null, and is found nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from outbox_pipelines.writer.errors import OutboxError

ITEMS = "[]"


class MemberPlace(NamedTuple):
    """Where a member is."""

    items: tuple[int, ...]
    """The numbers of the items that the path passes."""
    container: Any
    """The object or the list that has it."""
    name: Any
    """Its name or number there."""


def places(payload: Any, path: str) -> list[MemberPlace]:
    """Return where the members of a path are; none for an empty list.

    Raises:
        OutboxError: the path leads nowhere, or is none.
    """
    is_optional = path.endswith("?")
    return list(_places(payload, path, _steps_of(path), 0, (), is_optional))


def _steps_of(path: str) -> list[str]:
    """Return the names of a path, each of a list with `[]` at its end."""
    steps = path.removesuffix("?").split(".") if isinstance(path, str) else [""]
    if not all(step.removesuffix(ITEMS) for step in steps):
        raise OutboxError(
            f"{path!r} is not the path of a member: write customer.email, or lines[].name for each item of a "
            "list"
        )
    return steps


def _places(
    value: Any, path: str, steps: list[str], at: int, items: tuple[int, ...], is_optional: bool
) -> Iterator[MemberPlace]:
    step = steps[at]
    name = step.removesuffix(ITEMS)
    there = ".".join([*steps[:at], name])
    if not isinstance(value, dict) or name not in value:
        if is_optional and value is not None and not isinstance(value, dict):
            outer = ".".join(steps[:at])
            said = f"the member {outer} of the payload" if outer else "the payload"
            raise OutboxError(f"{said} is not an object: correct the path {path}")
        if is_optional:
            return
        raise OutboxError(
            f"the payload has no member {there} (path {path}): correct the path, or end it with ? if the "
            "member can be missing"
        )
    found = value[name]
    if step != name and not isinstance(found, list):
        if is_optional and found is None:
            return
        raise OutboxError(f"the member {there} of the payload is not a list: correct the path {path}")
    is_last = at == len(steps) - 1
    if step == name:
        if is_last:
            yield MemberPlace(items, value, name)
        else:
            yield from _places(found, path, steps, at + 1, items, is_optional)
        return
    for number, item in enumerate(found):
        if is_last:
            yield MemberPlace((*items, number), found, number)
        else:
            yield from _places(item, path, steps, at + 1, (*items, number), is_optional)


def refuse_overlap(paths: Iterable[str]) -> None:
    """Raise `OutboxError` if a path names a member within another one's."""
    # What begins with a path comes directly after it.
    known = sorted(([step.removesuffix(ITEMS) for step in _steps_of(path)], path) for path in paths)
    for (one, outer), (other, inner) in pairwise(known):
        if other[: len(one)] == one:
            raise OutboxError(f"the paths {outer} and {inner} overlap: name each member once")
