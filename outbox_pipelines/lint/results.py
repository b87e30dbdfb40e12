"""Calls of `emit` whose result is lost: not awaited, or with the error swallowed."""

from __future__ import annotations

from collections.abc import Iterator

from outbox_pipelines.lint.finding import NOT_AWAITED, SWALLOWED
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.story import Act, Around, Shelter, Step, Story, follows
from outbox_pipelines.lint.transactions import Found


def not_awaited(story: Story, _: Module) -> Iterator[Found]:
    """Yield coroutines that are never awaited."""
    for emit in story.of(Act.EMIT):
        if emit.dropped and emit.thing and emit.thing.is_async:
            yield (
                NOT_AWAITED,
                emit.node,
                "on an asynchronous connection nothing is written until it is awaited",
            )


def swallowed(story: Story, _: Module) -> Iterator[Found]:
    """Yield events whose failure does not roll back their rows."""
    for emit in story.of(Act.EMIT):
        for depth, block in enumerate(emit.around):
            if block.shelter is Shelter.SWALLOW and not _ends_with_it(story, emit, depth, block):
                line = getattr(block.node, "lineno", 0)
                yield (
                    SWALLOWED,
                    emit.node,
                    f"line {line} swallows the error: rows without their event",
                )
                break


def _ends_with_it(story: Story, emit: Step, depth: int, swallow: Around) -> bool:
    """Return whether the `try` contains the whole transaction: then an error rolls it back with the event."""
    if any(one.shelter in (Shelter.TRANSACTION, Shelter.CONNECTION) for one in emit.around[depth:]):
        return True
    commits = [step for step in story.of(Act.COMMIT) if swallow in step.around]
    return any(
        follows(commit, emit) and (commit.thing is None or emit.thing is None or commit.works_on(emit.thing))
        for commit in commits
    )
