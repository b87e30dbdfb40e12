"""A counterexample in words."""

from __future__ import annotations

from collections.abc import Callable

from tests.model.explore import Action, Broken, Counterexample, World


def story(make: Callable[[], World], found: Counterexample) -> str:
    """Return one line a step, and in the end what is broken."""
    world = make()
    lines = []
    for nth, action in enumerate(found.actions, start=1):
        lines.append(f"{nth:3}. {sentence(world, action)}")
        try:
            world.do(action)
        except Broken:
            break
    return "\n".join([*lines, f"     → {found.invariant}: {found.why}"])


def sentence(world: World, action: Action) -> str:
    """Return what an action means; a fault is marked."""
    tell = getattr(world, "tell", None)
    text = tell(action) if tell else " ".join(map(str, action))
    return f"! {text}" if action[0] in world.FAULTS else str(text)
