"""Explore every state that a world can reach: breadth-first, each state once.

Invariants:
- A state is identified by the fingerprint of `key()`: 64 bits, the same in every process and run.
- The first counterexample is a shortest one. Same world and bounds: same result.
- "Exhausted" is said only if no state was left out for a bound.
"""

from __future__ import annotations

import gc
import hashlib
import marshal
import pickle
import time
from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tests.model.snapshot import Snapshot

Action = tuple[Any, ...]
"""The name first; then what it is about: numbers, texts, None, tuples of these."""
Key = Any
"""Nested tuples of numbers, texts, booleans and None."""
LIVENESS = "liveness"
# A fault-free run to the end takes fewer steps in every scope; a longer one counts as endless.
MOST_STEPS = 2_000
# A state of the relay takes about 15 kB as a snapshot, and 4 kB packed.
MOST_UNPACKED = 8_000


class Broken(Exception):  # noqa: N818 - an invariant, not an error of the program
    """A state or a step that must not be."""

    def __init__(self, invariant: str, why: str = "") -> None:
        super().__init__(invariant, why)
        self.invariant = invariant
        self.why = why

    def __str__(self) -> str:
        return f"{self.invariant}: {self.why}" if self.why else self.invariant


class World(Protocol):
    """What is explored: plain mutable objects that can be pickled, and remembered by `snapshot`.

    A world may also have these:
        covered: set[str], labels of what a step has done; emptied before each step, no part of the key.
        live_key(): the key without what fault-free steps do not depend on, such as faults that are left.
        tell(action): a sentence that says what the action means.
        is_pointless(action, made): whether the action leads where another one leads; `made` has the labels of
            what was done, for each action that was tried before in the same state.
        actor(action): who does it, for fair schedules; by default the action itself.
    """

    FAULTS: Collection[str]
    """Names of actions that stop when faults stop."""

    def actions(self) -> Sequence[Action]:
        """What can happen now, in an order that depends on the state alone."""

    def do(self, action: Action) -> None:
        """Let it happen. Raises Broken."""

    def check(self) -> None:
        """Raise Broken where an invariant does not hold."""

    def key(self) -> Key: ...

    def is_done(self) -> bool:
        """Whether everything is published or handled."""


W = TypeVar("W", bound=World)


@dataclass(frozen=True)
class Counterexample:
    """How an invariant is broken."""

    invariant: str
    why: str
    actions: tuple[Action, ...]
    """From the first state."""


@dataclass
class Result:
    """What an exploration has seen."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    exhausted: bool = False
    """Whether there is no other state."""
    deadends: int = 0
    """States in which nothing can happen any more."""
    done: int = 0
    """States in which everything is done."""
    covered: Counter[str] = field(default_factory=Counter)
    """Names of actions, and labels, with how often each was seen."""
    missing: frozenset[str] = frozenset()
    """What had to be seen and was not."""
    broken: Counterexample | None = None

    @property
    def is_good(self) -> bool:
        """Whether no invariant was broken and all that had to be seen was seen."""
        return self.broken is None and not self.missing


def fingerprint(key: Key) -> int:
    """Return 64 bits that tell a key."""
    # Version 2 of marshal has no references to equal parts: equal keys have equal bytes.
    return int.from_bytes(hashlib.blake2b(marshal.dumps(key, 2), digest_size=8).digest(), "big")


def explore(
    world: World,
    *,
    states: int | None = None,
    depth: int | None = None,
    seconds: float | None = None,
    liveness: bool = True,
    must: Iterable[str] = (),
) -> Result:
    """Explore until there is no other state, a bound is reached or an invariant is broken.

    Args:
        states: at most about so many.
        depth: maximum distance from the first state, in steps.
        seconds: at most about so long.
        liveness: whether from each state everything must be done in the end, if faults stop.
        must: what has to be seen: names of actions, and labels of `covered`.
    """
    return _Exploration(world, states, depth, seconds, liveness).result(frozenset(must))


_Kept = Snapshot | bytes | tuple[Snapshot, Action]
"""A state in the frontier: a snapshot; its bytes; or a snapshot of the state before it, and the step."""


def _unpacked(kept: _Kept) -> Snapshot:
    """Put the world into a state of the frontier; return that."""
    if isinstance(kept, bytes):
        return Snapshot(pickle.loads(kept))
    if isinstance(kept, Snapshot):
        kept.restore()
        return kept
    before, action = kept
    before.restore()
    before.world.do(action)
    if hasattr(before.world, "covered"):
        before.world.covered.clear()
    return Snapshot(before.world)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: an exploration makes few cycles, and keeps many objects."""
    was = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, *was[1:])
    try:
        yield
    finally:
        gc.set_threshold(*was)
        gc.unfreeze()


class _Exploration:
    def __init__(
        self, world: World, states: int | None, depth: int | None, seconds: float | None, liveness: bool
    ) -> None:
        self._first = pickle.dumps(world, pickle.HIGHEST_PROTOCOL)
        self._most = states
        self._deepest = depth
        self._until = None if seconds is None else time.monotonic() + seconds
        self._endings = Endings() if liveness else None
        self._seen: set[int] = set()
        # By the number of a state: what it came from, and by which action.
        self._parents = array("q")
        self._by = array("l")
        self._numbers: dict[Action, int] = {}
        self._actions: list[Action] = []
        self._result = Result()
        self._steps: Counter[Action] = Counter()

    def result(self, must: frozenset[str]) -> Result:
        began = time.monotonic()
        result = self._result
        with _few_collections():
            result.exhausted = self._explored()
        result.states = len(self._seen)
        result.seconds = time.monotonic() - began
        for action, count in self._steps.items():
            result.covered[action[0]] += count
        # A run that was cut short by a broken invariant has not seen everything.
        result.missing = frozenset() if result.broken else must - result.covered.keys()
        return result

    def _explored(self) -> bool:
        """Whether all states were seen."""
        world: World = pickle.loads(self._first)
        faults = frozenset(world.FAULTS)
        has_labels = hasattr(world, "covered")
        is_pointless = getattr(world, "is_pointless", None)
        result = self._result
        frontier: deque[tuple[int, _Kept, int]] = deque()
        whole = True
        ahead: tuple[Broken, int, list[Action]] | None = None
        try:
            world.check()
        except Broken as broken:
            return self._found(broken, -1, None)
        self._seen.add(fingerprint(world.key()))
        self._number(-1, None)
        frontier.append((0, Snapshot(world), 0))
        while frontier:
            number, kept, level = frontier.popleft()
            result.depth = max(result.depth, level)
            here = _unpacked(kept)
            world = here.world
            if world.is_done():
                result.done += 1
            actions = world.actions()
            if not actions:
                result.deadends += 1
            if self._endings is not None:
                steps, problem = self._endings.reach(world, faults)
                if problem is not None and problem.invariant == LIVENESS:
                    return self._found(problem, number, None, steps)
                if problem is not None:
                    # Breadth-first finds the shortest way to it, if no bound comes before.
                    self._endings = None
                    ahead = problem, number, steps
                if steps:
                    # It has been led to its end.
                    here.restore()
            if self._deepest is not None and level >= self._deepest:
                whole = whole and not actions
                continue
            if (self._most is not None and len(self._seen) >= self._most) or (
                self._until is not None and time.monotonic() > self._until
            ):
                whole = False
                break
            made: dict[Action, frozenset[str]] = {}
            is_used = False
            for action in actions:
                if is_pointless is not None and is_pointless(action, made):
                    continue
                if is_used:
                    here.restore()
                is_used = True
                if has_labels:
                    world.covered.clear()  # type: ignore[attr-defined]
                result.transitions += 1
                self._steps[action] += 1
                try:
                    world.do(action)
                    if has_labels:
                        made[action] = frozenset(world.covered)  # type: ignore[attr-defined]
                        result.covered.update(made[action])
                        world.covered.clear()  # type: ignore[attr-defined]
                    print_of = fingerprint(world.key())
                    if print_of in self._seen:
                        continue
                    world.check()
                except Broken as broken:
                    return self._found(broken, number, action)
                self._seen.add(print_of)
                child = self._number(number, action)
                frontier.append((child, self._kept(here, action, len(frontier)), level + 1))
        if ahead is not None:
            problem, number, steps = ahead
            return self._found(problem, number, None, steps)
        return whole

    def _kept(self, before: Snapshot, action: Action, others: int) -> _Kept:
        """Return what the frontier needs of the state that the world is in."""
        if others >= MOST_UNPACKED:
            return pickle.dumps(before.world, pickle.HIGHEST_PROTOCOL)
        # If the number of states is bounded, most are never continued: a snapshot of each would be wasted.
        return Snapshot(before.world) if self._most is None else (before, action)

    def _number(self, parent: int, action: Action | None) -> int:
        self._parents.append(parent)
        if action is None:
            self._by.append(-1)
        else:
            number = self._numbers.setdefault(action, len(self._actions))
            if number == len(self._actions):
                self._actions.append(action)
            self._by.append(number)
        return len(self._parents) - 1

    def _found(self, broken: Broken, number: int, action: Action | None, more: Sequence[Action] = ()) -> bool:
        path = list(reversed(more)) if action is None else [action]
        while number > 0:
            path.append(self._actions[self._by[number]])
            number = self._parents[number]
        self._result.broken = Counterexample(broken.invariant, broken.why, tuple(reversed(path)))
        return False


class Endings:
    """States from which everything is done in the end, once faults have stopped."""

    def __init__(self) -> None:
        self._good: set[int] = set()

    def reach(self, world: World, faults: Collection[str]) -> tuple[list[Action], Broken | None]:
        """Lead a world by fair steps without faults to its end, or to a state that is known to reach it.

        Returns:
            The steps, and what was broken on the way.
        """
        key = getattr(world, "live_key", world.key)
        way: list[int] = []
        in_flight: set[int] = set()
        steps: list[Action] = []
        last: dict[Any, int] = {}
        actor = getattr(world, "actor", None)
        try:
            while True:
                print_of = fingerprint(key())
                if print_of in self._good or world.is_done():
                    self._good.update(way)
                    self._good.add(print_of)
                    return steps, None
                if print_of not in in_flight:
                    in_flight.add(print_of)
                    way.append(print_of)
                actions = [each for each in world.actions() if each[0] not in faults]
                if not actions:
                    raise Broken(LIVENESS, "nothing more can happen, and not everything is done")
                if len(steps) >= MOST_STEPS:
                    raise Broken(
                        LIVENESS, f"not everything is done after {MOST_STEPS:,} steps without faults"
                    )
                # The actor that has waited longest does what it has not done for longest.
                waited = [
                    (last.get(("of", each if actor is None else actor(each)), -1), last.get(each, -1))
                    for each in actions
                ]
                action = actions[waited.index(min(waited))]
                last[action] = last["of", action if actor is None else actor(action)] = len(steps)
                steps.append(action)
                world.do(action)
                world.check()
        except Broken as broken:
            if broken.invariant == LIVENESS:
                # The faults before are the story; of an endless run the first steps tell enough.
                steps = steps[:20]
            return steps, broken


def replay(world: World, actions: Iterable[Action]) -> Broken | None:
    """Let these actions happen in a new world; those that are not enabled are left out."""
    try:
        world.check()
        for action in actions:
            if action in world.actions():
                world.do(action)
                world.check()
    except Broken as broken:
        return broken
    return None
