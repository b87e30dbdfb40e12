"""Random histories in large scopes, and the short story of one that fails.

Invariants:
- Same world, seed and length: same history.
- Each history ends with a run without faults, in which everything must be done.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.model.explore import LIVENESS, Action, Broken, Counterexample, Endings, World, replay

Make = Callable[[], World]


@dataclass
class Runs:
    """What random histories have seen."""

    histories: int = 0
    steps: int = 0
    seconds: float = 0.0
    covered: Counter[str] = field(default_factory=Counter)
    broken: Counterexample | None = None
    seed: int | None = None
    """Of the history that failed."""


def random_runs(
    make: Make,
    *,
    seeds: Sequence[int],
    steps: int = 200,
    faults: float = 0.1,
    seconds: float | None = None,
) -> Runs:
    """Make one history for each seed, until one fails; that one is shrunk.

    Args:
        steps: of each history, before faults stop.
        faults: the share of steps that are faults, where there is a choice.
        seconds: at most about so long.
    """
    runs = Runs()
    began = time.monotonic()
    for seed in seeds:
        if seconds is not None and time.monotonic() - began > seconds:
            break
        actions, broken = history(make, seed, steps, faults, runs.covered)
        runs.histories += 1
        runs.steps += len(actions)
        if broken is not None:
            runs.broken, runs.seed = shrunk(make, actions, broken), seed
            break
    runs.seconds = time.monotonic() - began
    return runs


def history(
    make: Make, seed: int, steps: int, faults: float, covered: Counter[str] | None = None
) -> tuple[list[Action], Broken | None]:
    """Return the actions of one history up to the end of faults, and what was broken."""
    world = make()
    chance = random.Random(seed)
    done: list[Action] = []
    seen = Counter[str]() if covered is None else covered
    try:
        world.check()
        for _ in range(steps):
            actions = world.actions()
            usual = [each for each in actions if each[0] not in world.FAULTS]
            rare = [each for each in actions if each[0] in world.FAULTS]
            choice = rare if rare and (not usual or chance.random() < faults) else usual
            if not choice:
                break
            action = choice[chance.randrange(len(choice))]
            done.append(action)
            seen[action[0]] += 1
            world.do(action)
            if labels := getattr(world, "covered", None):
                seen.update(labels)
                labels.clear()
            world.check()
    except Broken as broken:
        return done, broken
    return done, Endings().reach(world, frozenset(world.FAULTS))[1]


def shrunk(make: Make, actions: Sequence[Action], broken: Broken) -> Counterexample:
    """Leave out actions as long as the same invariant is broken: delta debugging."""
    best, why = list(actions), broken.why

    def still(these: Sequence[Action]) -> str | None:
        found = _judge(make, these)
        return found.why if found is not None and found.invariant == broken.invariant else None

    size = max(1, len(best) // 2)
    while True:
        at, shorter = 0, False
        while at < len(best):
            less = best[:at] + best[at + size :]
            if (told := still(less)) is not None:
                best, why, shorter = less, told, True
            else:
                at += size
        if size > 1:
            size //= 2
        elif not shorter:
            break
    return Counterexample(broken.invariant, why, tuple(_enabled(make, best)))


def _judge(make: Make, actions: Sequence[Action]) -> Broken | None:
    world = make()
    found = replay(world, actions)
    if found is None:
        _, found = Endings().reach(world, frozenset(world.FAULTS))
    return found


def _enabled(make: Make, actions: Sequence[Action]) -> list[Action]:
    """Those that can happen when it is their turn."""
    world, kept = make(), []
    for action in actions:
        if action in world.actions():
            kept.append(action)
            try:
                world.do(action)
                world.check()
            except Broken:
                break
    return kept


__all__ = ["LIVENESS", "Runs", "history", "random_runs", "shrunk"]
