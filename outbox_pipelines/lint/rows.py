"""Statements on the outbox's own rows: written without `emit`, changed or deleted."""

from __future__ import annotations

from collections.abc import Iterator

from outbox_pipelines.lint.finding import CHANGED, PAST_HELPER
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.statements import Touch
from outbox_pipelines.lint.story import Story
from outbox_pipelines.lint.transactions import Found


def past_helper(story: Story, _: Module) -> Iterator[Found]:
    """Yield events written without the checks of `emit`."""
    for step in story.steps:
        if step.touch is Touch.INSERT:
            yield (
                PAST_HELPER,
                step.node,
                "the event is written without `emit` and its checks of transaction and content",
            )


def changed(story: Story, _: Module) -> Iterator[Found]:
    """Yield changes and deletions of rows in the append-only table."""
    for step in story.steps:
        if step.touch is Touch.CHANGE:
            yield CHANGED, step.node, "the outbox is append-only: do not change or delete its rows"
