"""A snapshot puts a world back as it was."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pytest

from tests.model.snapshot import Snapshot


@dataclass(slots=True)
class Slotted:
    value: int
    others: list[int]


class SomeError(Exception):
    """One that a world keeps."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__("some")
        self.numbers = numbers


class World:
    """One of everything that worlds consist of."""

    def __init__(self) -> None:
        self.number = 1
        self.items: list[Any] = [1, [2]]
        self.same = self.items
        self.members = {1, 2}
        self.entries: dict[str, Any] = {"a": 1, "b": {"c": 2}}
        self.queue: deque[Any] = deque([1, {2}])
        self.slotted = Slotted(1, [1])
        self.pair = (1, [2], frozenset((3,)))
        self.error = SomeError([1])
        self.other: World | None = None
        self.call = self.change

    def change(self) -> None:
        self.number += 1
        self.items[1].append(3)
        self.items.append(4)
        self.members.add(3)
        self.entries["b"]["c"] = 5
        self.entries["a"] = self.entries.pop("a")
        self.queue[-1].clear()
        self.queue.appendleft(6)
        self.slotted.value = 7
        self.slotted.others.append(8)
        self.pair[1].append(9)
        self.error.numbers.append(10)

    def seen(self) -> Any:
        slotted = self.slotted.value, self.slotted.others
        entries = list(self.entries.items())
        kept = self.pair, self.error.numbers
        return repr((self.number, self.items, self.members, entries, self.queue, slotted, kept))


def test_everything_is_put_back() -> None:
    """Guards each state against what was done in the one before."""
    world = World()
    world.other = World()
    world.other.other = world
    was = world.seen(), world.other.seen()
    here = Snapshot(world)
    for _ in range(2):
        world.call()
        world.other.change()
        assert world.other.seen() != was[1]
        here.restore()
        assert (world.seen(), world.other.seen()) == was
        assert world.same is world.items


def test_objects_are_put_back() -> None:
    """Guards against an object, a list or an attribute that was replaced, removed or added."""
    world = World()
    items, was = world.items, world.seen()
    here = Snapshot(world)
    world.items = []
    del world.number
    world.__dict__["new"] = 1
    items.clear()
    here.restore()
    assert world.items is items
    assert world.seen() == was
    assert "new" not in world.__dict__


def test_two_states_of_one_world() -> None:
    """Guards against a snapshot that changes with what comes after it."""
    world = World()
    first, was = Snapshot(world), world.seen()
    world.change()
    second, later = Snapshot(world), world.seen()
    for here, expected in ((first, was), (second, later), (first, was)):
        world.change()
        here.restore()
        assert world.seen() == expected


@pytest.mark.parametrize("unknown", [iter([1]), Counter("a"), bytearray(b"a")])
def test_what_cannot_be_remembered_is_refused(unknown: Any) -> None:
    """Guards against an object that would keep what another state did to it."""
    world = World()
    world.items.append(unknown)
    with pytest.raises(TypeError, match="no rule remembers its state"):
        Snapshot(world)
