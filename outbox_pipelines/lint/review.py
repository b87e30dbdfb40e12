"""Every function that writes rows and publishes: the places to review before you introduce an outbox.

Invariants:
- The report judges nothing: it lists each function that writes rows and sends a message, in any order.
- It lists the function that does both, not the callers of that function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_pipelines.lint import dual_write
from outbox_pipelines.lint.dual_write import Done
from outbox_pipelines.lint.effects import Site
from outbox_pipelines.lint.story import Story

if TYPE_CHECKING:
    from outbox_pipelines.lint.linter import Read
    from outbox_pipelines.lint.module import Module

_ORDERS: Final = {
    "OB006": "publishes before the commit",
    "OB010": "publishes while the row is saved",
    "OB011": "publishes apart from the commit",
}


@dataclass(frozen=True, order=True)
class Place:
    """A function that writes and publishes, with the lines of both and the places they lead to."""

    path: str
    line: int
    function: str
    order: str
    writes: list[str]
    publishes: list[str]


def places(read: Read) -> list[Place]:
    """Return all places, in order."""
    found = (
        place
        for module in read.modules.values()
        for story in module.stories
        if (place := _place(story, module, read)) is not None
    )
    return sorted(found)


def _place(story: Story, module: Module, read: Read) -> Place | None:
    done = dual_write.steps(story, module, read.effects)
    published = [one for one in done if one.effect.publishes and not one.is_both]
    written = [one for one in done if (one.effect.writes or one.effect.commits) and not one.is_both]
    hook = dual_write.hook_of(story, module)
    if not published or not (written or hook) or dual_write.is_relay(story):
        return None
    codes = {
        rule.code
        for look in (dual_write.before_commit, dual_write.in_hook, dual_write.beside_commit)
        for rule, _, _ in look(story, module, read.effects)
    }
    line = getattr(story.node, "lineno", 1)
    order = "; ".join(f"{_ORDERS[code]} ({code})" for code in sorted(codes)) or "order unknown"
    writes = [_line(one, one.effect.writes) for one in written] or [f"{hook}: the row that is saved"]
    return Place(
        module.path,
        line,
        story.key or "the module",
        order,
        writes,
        [_line(one, one.effect.publishes) for one in published],
    )


def _line(one: Done, site: Site | None) -> str:
    line = one.step.node.lineno
    return f"line {line}" + (f" ({site.name}, {site.path}:{site.line})" if site and site.line != line else "")
