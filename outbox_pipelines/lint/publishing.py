"""Messages sent to Kafka before the transaction beside them has committed: the dual write.

Invariants:
- A function that handles the rows of an outbox or a queue itself is a relay: it has to publish.
- What is published after the commit is not reported; it can be lost, but it is never untrue.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from outbox_pipelines.lint.finding import DUAL_WRITE
from outbox_pipelines.lint.libraries import Role, Thing
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.statements import Touch
from outbox_pipelines.lint.story import Act, Around, Ending, Shelter, Step, Story, follows
from outbox_pipelines.lint.transactions import Found, is_callers

# Statements of a module that are not its own work.
_ELSEWHERE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WHY = "the message is out even if the transaction {} rolls back"


def before_commit(story: Story, module: Module) -> Iterator[Found]:
    """Publishes inside a transaction that writes."""
    published = _published(story, module)
    if not published or _is_relay(story):
        return
    for publish in published:
        if any(arm.ending is Ending.RAISE for arm in publish.arms):
            continue
        block = next((one for one in publish.around if _writes(one, story)), None)
        if block is not None:
            line = getattr(block.node, "lineno", 0)
            yield DUAL_WRITE, publish.node, _WHY.format(f"of line {line}")
        elif write := _uncommitted(story, module, publish):
            yield DUAL_WRITE, publish.node, _WHY.format(f"that writes in line {write.node.lineno}")


def _published(story: Story, module: Module) -> list[Step]:
    """Its own publishes, and calls of functions of this module that only publish."""
    inner = {
        one.called_as
        for one in module.stories
        if one.of(Act.PUBLISH) and not one.of(Act.COMMIT, Act.WRITE, Act.EMIT)
    }
    return [*story.of(Act.PUBLISH), *(step for step in story.of(Act.CALL) if step.name in inner)]


def _is_relay(story: Story) -> bool:
    if any(step.touch is Touch.CLAIM for step in story.steps):
        return True
    if story.of(Act.EMIT):
        return False
    own = [node for node in getattr(story.node, "body", []) if not isinstance(node, _ELSEWHERE)]
    return any("outbox" in text.lower() for text in (story.name, *map(ast.unparse, own)))


def _writes(block: Around, story: Story) -> bool:
    """Whether a transaction block writes, as far as can be seen; one that only reads does not."""
    if block.shelter is not Shelter.TRANSACTION:
        return False
    acts = {step.act for step in story.steps if block in step.around}
    return Act.READ not in acts or bool(acts & {Act.WRITE, Act.EMIT, Act.USE})


def _uncommitted(story: Story, module: Module, publish: Step) -> Step | None:
    """A write in the transaction that is open while the message is sent."""
    for write in story.of(Act.WRITE, Act.EMIT):
        thing = write.thing
        if thing is None or thing.autocommit:
            continue
        first, last = (write, publish) if write.number < publish.number else (publish, write)
        if not follows(last, first) or (first is publish and not _is_there(story, thing, publish)):
            continue
        if any(follows(end, first) and follows(last, end) for end in module.ends(story, thing)):
            continue
        if any(_is_certain(end, thing) and follows(end, last) for end in story.on(thing, Act.COMMIT)):
            return write
        if first is write and _is_left_open(story, thing, publish):
            return write
    return None


def _is_there(story: Story, thing: Thing, publish: Step) -> bool:
    """Whether the connection is in use by then: else the message may belong to something before."""
    return (
        is_callers(thing)
        or any(follows(publish, step) for step in story.on(thing, *Act))
        or any(one.thing is not None and one.thing.origin == thing.origin for one in publish.around)
    )


def _is_left_open(story: Story, thing: Thing, publish: Step) -> bool:
    """Whether a caller has to commit: of a session, if nobody out of sight had it until then."""
    return thing.role is Role.SESSION and not any(follows(publish, use) for use in story.on(thing, Act.USE))


def _is_certain(commit: Step, thing: Thing) -> bool:
    """Whether it ends a transaction: the end of a block may, if the connection is in autocommit mode."""
    return not commit.implicit or thing.autocommit is False
