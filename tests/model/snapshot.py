"""Remember a state of a world, and put the world back into it, without pickle.

Invariants:
- The same objects contain again what they contained; objects that came afterwards are no longer referred to.
- What never changes is not remembered: numbers, texts, functions, members of enumerations, and objects of
  classes that define how they are pickled (`__reduce__`, `copyreg`).
"""

from __future__ import annotations

import copyreg
from collections import deque
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

# Of classes that a program defines.
_HEAP_TYPE = 1 << 9
_FIXED, _PLAIN, _SLOTS, _LIST, _SET, _DICT, _QUEUE, _PARTS, _METHOD = range(9)


class _Kinds(dict[type, int]):
    """By class: what its objects contain."""

    def __missing__(self, kind: type) -> int:
        found = self[kind] = _kind(kind)
        return found


def _kind(kind: type) -> int:
    if kind in copyreg.dispatch_table or issubclass(kind, Enum | type):
        return _FIXED
    if issubclass(kind, tuple):
        return _PARTS
    if issubclass(kind, BaseException):
        # What it was made with does not change.
        return _PLAIN
    is_builtin = not kind.__flags__ & _HEAP_TYPE
    if is_builtin or issubclass(kind, dict | list | set | frozenset | deque):
        raise TypeError(f"a world cannot contain a {kind.__qualname__}: no rule remembers its state")
    if kind.__reduce__ is not object.__reduce__:
        return _FIXED
    return _SLOTS if copyreg._slotnames(kind) else _PLAIN  # type: ignore[attr-defined]


_KINDS = _Kinds(
    {
        **dict.fromkeys(
            (int, float, str, bytes, bool, type(None), FunctionType, BuiltinFunctionType), _FIXED
        ),
        list: _LIST,
        set: _SET,
        dict: _DICT,
        deque: _QUEUE,
        tuple: _PARTS,
        frozenset: _PARTS,
        MethodType: _METHOD,
    }
)


class Snapshot:
    """What a world, and all that it refers to, contains now."""

    __slots__ = ("_attributes", "_dicts", "_lists", "_queues", "_sets", "_slots", "world")

    def __init__(self, world: Any) -> None:
        self.world = world
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[Any, list[tuple[str, Any]]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._queues: list[tuple[deque[Any], deque[Any]]] = []
        self._remember(world)

    def restore(self) -> None:
        """Put everything back."""
        for now, then in self._attributes:
            now.update(then)
            if len(now) != len(then):
                now.clear()
                now.update(then)
        for one, values in self._slots:
            _fill(one, values)
        for items, were in self._lists:
            items[:] = were
        for members, before in self._sets:
            members.clear()
            members.update(before)
        for entries, had in self._dicts:
            # Their order counts.
            entries.clear()
            entries.update(had)
        for queue, waited in self._queues:
            queue.clear()
            queue.extend(waited)

    def _remember(self, world: Any) -> None:
        kinds, seen, found = _KINDS, {id(world)}, [world]
        see, wait = seen.add, found.append
        while found:
            one = found.pop()
            kind = kinds[type(one)]
            values: Any
            if kind == _PLAIN:
                now = one.__dict__
                then = now.copy()
                self._attributes.append((now, then))
                values = then.values()
            elif kind == _LIST:
                values = one.copy()
                self._lists.append((one, values))
            elif kind == _SET:
                values = one.copy()
                self._sets.append((one, values))
            elif kind == _DICT:
                then = one.copy()
                self._dicts.append((one, then))
                values = [*then, *then.values()]
            elif kind == _QUEUE:
                values = one.copy()
                self._queues.append((one, values))
            elif kind == _SLOTS:
                had = _slots(one)
                self._slots.append((one, had))
                values = [value for _, value in had]
            elif kind == _METHOD:
                values = (one.__self__,)
            else:
                values = one
            for value in values:
                if kinds[type(value)] and (name := id(value)) not in seen:
                    see(name)
                    wait(value)


_ABSENT = object()


def _slots(one: Any) -> list[tuple[str, Any]]:
    names = copyreg._slotnames(type(one))  # type: ignore[attr-defined]
    had = [(name, getattr(one, name, _ABSENT)) for name in names]
    if hasattr(one, "__dict__"):
        raise TypeError(f"a world cannot contain a {type(one).__qualname__}: it has slots, and attributes")
    return [(name, value) for name, value in had if value is not _ABSENT]


def _fill(one: Any, values: list[tuple[str, Any]]) -> None:
    for name, value in values:
        object.__setattr__(one, name, value)
