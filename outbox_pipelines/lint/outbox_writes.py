"""Events apart from their rows: outside any transaction, after the commit, or on another connection.

Also calls of `emit` whose result is lost, and statements on the outbox's own rows.

Invariants:
- A function that receives a connection does not own its transaction: a transaction that a caller may have
  opened, or may still commit, is never reported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from outbox_pipelines.lint.finding import (
    AFTER_COMMIT,
    CHANGED,
    ELSEWHERE,
    NOT_AWAITED,
    OUTSIDE,
    PAST_HELPER,
    SWALLOWED,
    Rule,
)
from outbox_pipelines.lint.libraries import Library, Thing
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.story import Act, Around, Shelter, Step, Story, follows
from outbox_pipelines.lint.syntax import Touch, is_task, path_of

RuleFinding = tuple[Rule, ast.expr | ast.stmt, str]
_IN_BLOCK: Final = (Shelter.TRANSACTION, Shelter.PERHAPS)


def outside(story: Story, module: Module) -> Iterator[RuleFinding]:
    """Yield events that are committed separately."""
    for emit in story.of(Act.EMIT):
        thing = emit.thing
        if thing is None:
            continue
        if thing.library is Library.DJANGO:
            is_open = _in_a_block(emit, thing) or story.on(thing, Act.BEGIN)
            if not is_open and _is_entered_from_outside(story, module):
                yield (
                    OUTSIDE,
                    emit.node,
                    "no `transaction.atomic` is open: Django commits each statement separately",
                )
        elif thing.autocommit and thing.library is Library.SQLALCHEMY:
            # Neither `begin()` nor `commit()` makes a transaction there.
            yield OUTSIDE, emit.node, "the isolation level is AUTOCOMMIT: each statement commits separately"
        elif thing.autocommit and not _in_a_transaction(emit, thing, story, module):
            yield (
                OUTSIDE,
                emit.node,
                "the connection commits each statement separately, and no transaction is open",
            )


def _in_a_transaction(emit: Step, thing: Thing, story: Story, module: Module) -> bool:
    if _in_a_block(emit, thing) or story.on(thing, Act.BEGIN):
        return True
    return thing.shared and thing.origin in module.opened


def _in_a_block(step: Step, thing: Thing) -> bool:
    return any(
        one.shelter in _IN_BLOCK
        and (thing.library is Library.DJANGO or (one.thing is not None and one.thing.origin == thing.origin))
        for one in step.around
    )


def _is_entered_from_outside(story: Story, module: Module) -> bool:
    """Return whether Django or a task queue calls a function: then no known caller opens a transaction."""
    node = story.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
        return False
    if story.called_as in module.called:
        return False
    arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    if (arguments[1:2] if story.owner else arguments[:1]) == ["request"]:
        return not module.facts.atomic_requests
    if story.owner and node.name == "handle":
        return any((path_of(base) or "").endswith("BaseCommand") for base in story.owner.bases)
    return any(is_task(decorator) for decorator in node.decorator_list)


def after_commit(story: Story, module: Module) -> Iterator[RuleFinding]:
    """Yield events after the commit that no further commit follows."""
    for emit in story.of(Act.EMIT):
        thing = emit.thing
        if thing is None or thing.autocommit or thing.library is Library.DJANGO or _is_held(emit, thing):
            continue
        committed = [step for step in story.on(thing, Act.COMMIT) if follows(emit, step)]
        ends = [*module.ends(story, thing), *story.on(thing, Act.USE)]
        if not committed or any(follows(end, emit) for end in ends):
            continue
        if is_callers(thing) and _between(story, thing, committed[-1], emit):
            continue
        line = committed[-1].node.lineno
        yield (
            AFTER_COMMIT,
            emit.node,
            f"the transaction was committed in line {line}, and nothing commits this event",
        )


def _is_held(emit: Step, thing: Thing) -> bool:
    """Return whether a block around a step commits, or may."""
    return _in_a_block(emit, thing) or any(one.stack for one in emit.around)


def is_callers(thing: Thing) -> bool:
    """Return whether other code made the connection and may continue to use it."""
    return thing.shared or thing.autocommit is None


def _between(story: Story, thing: Thing, commit: Step, emit: Step) -> bool:
    """Return whether a new unit of work has begun after the commit; the caller may end it."""
    return any(follows(step, commit) and follows(emit, step) for step in story.on(thing, Act.WRITE, Act.USE))


def elsewhere(story: Story, _: Module) -> Iterator[RuleFinding]:
    """Yield events on a connection that does nothing else, while the rows use another connection."""
    for emit in story.of(Act.EMIT):
        thing = emit.thing
        statements = [] if thing is None else story.on(thing, Act.WRITE, Act.READ, Act.USE)
        if thing is None or any(step.touch is None for step in statements):
            continue
        for write in story.of(Act.WRITE):
            if (
                write.thing
                and _are_apart(write.thing, thing)
                and (follows(emit, write) or follows(write, emit))
            ):
                line = write.node.lineno
                yield ELSEWHERE, emit.node, f"line {line} writes through another connection or session"
                break


def _are_apart(one: Thing, other: Thing) -> bool:
    """Return whether these are certainly two connections: parameters of different types might be one."""
    if one.origin == other.origin:
        return False
    return one.role is other.role or not (is_callers(one) and is_callers(other))


def not_awaited(story: Story, _: Module) -> Iterator[RuleFinding]:
    """Yield coroutines that are never awaited."""
    for emit in story.of(Act.EMIT):
        if emit.dropped and emit.thing and emit.thing.is_async:
            yield (
                NOT_AWAITED,
                emit.node,
                "on an asynchronous connection nothing is written until it is awaited",
            )


def swallowed(story: Story, _: Module) -> Iterator[RuleFinding]:
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


def past_helper(story: Story, _: Module) -> Iterator[RuleFinding]:
    """Yield events written without the checks of `emit`."""
    for step in story.steps:
        if step.touch is Touch.INSERT:
            yield (
                PAST_HELPER,
                step.node,
                "the event is written without `emit` and its checks of transaction and content",
            )


def changed(story: Story, _: Module) -> Iterator[RuleFinding]:
    """Yield changes and deletions of rows in the append-only table."""
    for step in story.steps:
        if step.touch is Touch.CHANGE:
            yield CHANGED, step.node, "the outbox is append-only: do not change or delete its rows"
