"""Messages sent to a broker before the transaction beside them has committed: the dual write.

Invariants:
- A function that handles the rows of an outbox or a queue itself is a relay: it has to publish.
- What is published after the commit is not reported here; it can be lost, but it is never untrue. Nor are
  tasks of Celery: they are queued beside a transaction for many reasons.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from outbox_pipelines.lint.effects import Effect, Effects
from outbox_pipelines.lint.finding import DUAL_WRITE
from outbox_pipelines.lint.libraries import Library, Role, Thing
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.statements import Touch
from outbox_pipelines.lint.story import Act, Around, Ending, Shelter, Step, Story, follows
from outbox_pipelines.lint.transactions import Found, is_callers

# Statements of a module that are not its own work.
_ELSEWHERE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WHY = "the message is out even if the transaction {} rolls back"


def before_commit(story: Story, module: Module, effects: Effects) -> Iterator[Found]:
    """Publishes inside a transaction that writes."""
    published = [step for step in story.steps if _only_publishes(step, story, module, effects)]
    if not published or is_relay(story):
        return
    for publish in published:
        site = effects.of_step(publish, story, module.path).publishes
        if (site and site.is_task) or is_after_commit(publish):
            continue
        if any(arm.ending is Ending.RAISE for arm in publish.arms):
            continue
        block = block_of(publish, story, module, effects)
        why = ""
        if block is not None:
            why = _WHY.format(f"of line {getattr(block.node, 'lineno', 0)}")
        elif write := _uncommitted(story, module, effects, publish):
            why = _WHY.format(f"that writes in line {write.node.lineno}")
        if why:
            yield DUAL_WRITE, publish.node, why + told(publish, story, module, effects)


def block_of(publish: Step, story: Story, module: Module, effects: Effects) -> Around | None:
    """The transaction block around a step that writes, too."""
    return next((one for one in publish.around if _writes(one, publish, story, module, effects)), None)


def is_after_commit(step: Step) -> bool:
    """Whether it is done in `on_commit`."""
    return any(one.shelter is Shelter.COMMITTED for one in step.around)


def told(step: Step, story: Story, module: Module, effects: Effects) -> str:
    """Where the message is sent, if that is in another function."""
    site = effects.of_step(step, story, module.path).publishes
    if step.act is Act.PUBLISH or site is None:
        return ""
    return f" ({site.name} publishes, {site.path}:{site.line})"


def _only_publishes(step: Step, story: Story, module: Module, effects: Effects) -> bool:
    """Its own publishes, and calls of functions that only publish."""
    if step.act is Act.PUBLISH:
        return True
    if step.act is not Act.CALL:
        return False
    if step.callee:
        effect = effects.of(step.callee)
        return effect.publishes is not None and not (effect.ends or effect.commits or effect.writes)
    return any(
        one.called_as == step.name and one.of(Act.PUBLISH) and not one.of(Act.COMMIT, Act.WRITE, Act.EMIT)
        for one in module.stories
    )


def is_relay(story: Story) -> bool:
    """Whether it has to publish: it handles the rows of an outbox or a queue."""
    if any(step.touch is Touch.CLAIM for step in story.steps):
        return True
    if story.of(Act.EMIT):
        return False
    own = [node for node in getattr(story.node, "body", []) if not isinstance(node, _ELSEWHERE)]
    return any("outbox" in text.lower() for text in (story.name, *map(ast.unparse, own)))


def _writes(block: Around, publish: Step, story: Story, module: Module, effects: Effects) -> bool:
    """Whether a transaction block writes, as far as can be seen; one that only reads does not."""
    inside = [step for step in story.steps if block in step.around]
    does = Effect()
    for step in inside:
        does |= effects.of_step(step, story, module.path)
    acts = {step.act for step in inside}
    if block.shelter is Shelter.TRANSACTION:
        # Tasks are queued for many reasons: only beside rows that are written for certain.
        is_task = publish.thing is not None and publish.thing.library is Library.CELERY
        return does.writes is not None or (not is_task and (Act.READ not in acts or Act.USE in acts))
    if block.callee and effects.commits_behind(block.callee):
        return does.writes is not None and not any(_ends(step, story, module, effects) for step in inside)
    return False


def _ends(step: Step, story: Story, module: Module, effects: Effects) -> bool:
    return effects.of_step(step, story, module.path).ends


def _uncommitted(story: Story, module: Module, effects: Effects, publish: Step) -> Step | None:
    """A write in the transaction that is open while the message is sent."""
    called = [step for step in story.of(Act.CALL) if _ends(step, story, module, effects)]
    for write in story.of(Act.WRITE, Act.EMIT):
        thing = write.thing
        if thing is None or thing.autocommit:
            continue
        first, last = (write, publish) if write.number < publish.number else (publish, write)
        if not follows(last, first) or (first is publish and not _is_there(story, thing, publish)):
            continue
        ends = [*module.ends(story, thing), *called]
        if any(follows(end, first) and follows(last, end) for end in ends):
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
