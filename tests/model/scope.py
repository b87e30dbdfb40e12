"""A scope: a world, its size, and what has to be seen in it.

A small scope is explored by `make test-system`, a large one by `make model`. A scope with `seeds` is too
large for that: it gets so many random histories.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tests.model.explore import Result, World, explore
from tests.model.random_runs import Runs, random_runs
from tests.model.story import story


@dataclass(frozen=True)
class Scope:
    """A world of some size."""

    world: Callable[[], World]
    about: str
    """What is in it, in a line."""
    must: Collection[str] = ()
    """Names of actions, and labels, that have to be seen."""
    is_small: bool = True
    """Whether `make test-system` explores it too."""
    states: int | None = None
    """At most about so many are explored; None: all."""
    liveness: bool = True
    seeds: int = 0
    """Random histories instead of all states."""
    steps: int = 200
    """Of each random history, before faults stop."""
    faults: float = 0.1
    """The share of random steps that are faults."""

    def extent(self, states: int | None = None, seeds: int | None = None) -> str:
        """Say how far it is explored."""
        if self.seeds:
            return f"{seeds or self.seeds:,} random histories"
        most = states or self.states
        if most:
            return f"at most {most:,} states"
        return "exhausted" if self.is_small else "to its end, or --seconds"

    def explored(self, *, states: int | None = None, seconds: float | None = None) -> Result:
        """Explore it, with other bounds if they are given."""
        return explore(
            self.world(),
            states=states or self.states,
            seconds=seconds,
            liveness=self.liveness,
            must=self.must,
        )

    def at_random(self, *, first: int = 0, seeds: int | None = None, seconds: float | None = None) -> Runs:
        """Make random histories, from a first seed on."""
        return random_runs(
            self.world,
            seeds=range(first, first + (seeds or self.seeds)),
            steps=self.steps,
            faults=self.faults,
            seconds=seconds,
        )

    def told(self, found: Result | Runs) -> str:
        """Return the story of what is broken."""
        return story(self.world, found.broken) if found.broken else ""
