"""Messages sent to a broker before their transaction has committed: the dual write.

Invariants:
- A function that handles the rows of an outbox or a queue is a relay: it must publish.
- A publish after the commit is not reported here: the message can be lost, but it is never wrong. Celery
  tasks are not reported either: there are many reasons to queue them during a transaction.
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

# Statements of a module that do no work.
_ELSEWHERE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WHY = "the message is sent even if the transaction {} rolls back"


def before_commit(story: Story, module: Module, effects: Effects) -> Iterator[Found]:
    """Yield publishes inside a transaction that writes."""
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
    """Return the transaction block around a step, if that block also writes."""
    return next((one for one in publish.around if _writes(one, publish, story, module, effects)), None)


def is_after_commit(step: Step) -> bool:
    """Return whether the step runs in `on_commit`."""
    return any(one.shelter is Shelter.COMMITTED for one in step.around)


def told(step: Step, story: Story, module: Module, effects: Effects) -> str:
    """Return where the message is sent, if another function sends it."""
    site = effects.of_step(step, story, module.path).publishes
    if step.act is Act.PUBLISH or site is None:
        return ""
    return f" ({site.name} publishes, {site.path}:{site.line})"


def _only_publishes(step: Step, story: Story, module: Module, effects: Effects) -> bool:
    """Return a function's own publishes, and its calls of functions that only publish."""
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
    """Return whether a function must publish: it handles the rows of an outbox or a queue."""
    if any(step.touch is Touch.CLAIM for step in story.steps):
        return True
    if story.of(Act.EMIT):
        return False
    own = [node for node in getattr(story.node, "body", []) if not isinstance(node, _ELSEWHERE)]
    return any("outbox" in text.lower() for text in (story.name, *map(ast.unparse, own)))


def _writes(block: Around, publish: Step, story: Story, module: Module, effects: Effects) -> bool:
    """Return whether a transaction block writes, as far as is known; one that only reads does not."""
    inside = [step for step in story.steps if block in step.around]
    does = Effect()
    for step in inside:
        does |= effects.of_step(step, story, module.path)
    acts = {step.act for step in inside}
    if block.shelter is Shelter.TRANSACTION:
        # There are many reasons to queue tasks: report them only with rows that are certainly written.
        is_task = publish.thing is not None and publish.thing.library is Library.CELERY
        return does.writes is not None or (not is_task and (Act.READ not in acts or Act.USE in acts))
    if block.callee and effects.commits_behind(block.callee):
        return does.writes is not None and not any(_ends(step, story, module, effects) for step in inside)
    return False


def _ends(step: Step, story: Story, module: Module, effects: Effects) -> bool:
    return effects.of_step(step, story, module.path).ends


def _uncommitted(story: Story, module: Module, effects: Effects, publish: Step) -> Step | None:
    """Return a write in the transaction that is open while the message is sent."""
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
    """Return whether the connection is already in use; otherwise the message may belong to earlier work."""
    return (
        is_callers(thing)
        or any(follows(publish, step) for step in story.on(thing, *Act))
        or any(one.thing is not None and one.thing.origin == thing.origin for one in publish.around)
    )


def _is_left_open(story: Story, thing: Thing, publish: Step) -> bool:
    """Return whether a caller must commit; of a session, if no unknown code has used it before."""
    return thing.role is Role.SESSION and not any(follows(publish, use) for use in story.on(thing, Act.USE))


def _is_certain(commit: Step, thing: Thing) -> bool:
    """Return whether a step ends a transaction; a block's end may, if the connection is in autocommit."""
    return not commit.implicit or thing.autocommit is False
