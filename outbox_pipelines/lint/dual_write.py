"""Messages sent to a broker before their transaction has committed (the dual write), or apart from it.

Invariants:
- A function that handles the rows of an outbox or a queue is a relay: it must publish.
- A publish after the commit is not reported here: the message can be lost, but it is never wrong. Celery
  tasks are not reported either: there are many reasons to queue them during a transaction.
- A hook cannot know whether the row's transaction will commit: the message is sent in any case.
- A place is reported only if rows are certainly written, and certainly committed apart from the message.
- The function that does both is reported, not its callers.
- The report of places judges nothing: it lists each function that writes rows and sends a message.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_pipelines.lint.effects import Effect, Effects, Site, is_statement
from outbox_pipelines.lint.finding import APART, DUAL_WRITE, IN_HOOK
from outbox_pipelines.lint.libraries import ROW_WRITES, Library, Role, Thing
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.outbox_writes import RuleFinding, is_callers
from outbox_pipelines.lint.story import Act, Around, Ending, Shelter, Step, Story, follows
from outbox_pipelines.lint.syntax import Touch, path_of

if TYPE_CHECKING:
    from outbox_pipelines.lint.linter import Read
    from outbox_pipelines.lint.module import Module

# Statements of a module that do no work.
_ELSEWHERE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WHY = "the message is sent even if the transaction {} rolls back"
_SIGNALS: Final = {
    f"django.db.models.signals.{when}_{what}" for when in ("pre", "post") for what in ("save", "delete")
} | {"django.db.models.signals.m2m_changed"}
_EVENTS: Final = {
    f"{when}_{what}" for when in ("before", "after") for what in ("insert", "update", "delete", "flush")
} | {"before_commit", "after_flush_postexec"}
AFTER_COMMIT: Final = "after_commit"


def before_commit(story: Story, module: Module, effects: Effects) -> Iterator[RuleFinding]:
    """Yield publishes inside a transaction that writes."""
    published = [step for step in story.steps if _only_publishes(step, module, effects)]
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
            yield DUAL_WRITE, publish.node, why + sent_by(publish, story, module, effects)


def block_of(publish: Step, story: Story, module: Module, effects: Effects) -> Around | None:
    """Return the transaction block around a step, if that block also writes."""
    return next((one for one in publish.around if _writes(one, publish, story, module, effects)), None)


def is_after_commit(step: Step) -> bool:
    """Return whether the step runs in `on_commit`."""
    return any(one.shelter is Shelter.COMMITTED for one in step.around)


def sent_by(step: Step, story: Story, module: Module, effects: Effects) -> str:
    """Return where the message is sent, if another function sends it."""
    site = effects.of_step(step, story, module.path).publishes
    if step.act is Act.PUBLISH or site is None:
        return ""
    return f" ({site.name} publishes, {site.path}:{site.line})"


def _only_publishes(step: Step, module: Module, effects: Effects) -> bool:
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


def in_hook(story: Story, module: Module, effects: Effects) -> Iterator[RuleFinding]:
    """Yield publishes in a hook."""
    hook = hook_of(story, module)
    if hook in ("", AFTER_COMMIT) or is_relay(story):
        return
    for step in story.steps:
        if is_message(step, story, module, effects) and not is_after_commit(step):
            why = f"{hook} runs before the row's transaction commits; the message is sent even on rollback"
            yield IN_HOOK, step.node, why + sent_by(step, story, module, effects)


def is_message(step: Step, story: Story, module: Module, effects: Effects) -> bool:
    """Return whether a step sends a message; a queued task is not a message."""
    if step.act not in (Act.PUBLISH, Act.CALL) or (step.thing and step.thing.library is Library.CELERY):
        return False
    site = effects.of_step(step, story, module.path).publishes
    return site is not None and not site.is_task


def hook_of(story: Story, module: Module) -> str:
    """Return which hook a function is; empty if it is not a hook."""
    node = story.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    if story.owner is not None:
        is_model = module.project.is_django_model(f"{module.path}::{story.owner.name}")
        return f"`{story.name}` of a model" if is_model and story.name in ROW_WRITES else ""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and (found := _hook(module, decorator.func, decorator.args)):
            return found
    return module.hooks.get(story.name, "")


def connected(tree: ast.Module, module: Module) -> Iterator[tuple[str, str]]:
    """Functions that are made hooks by a call: `post_save.connect(f)`, `event.listen(Session, "…", f)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=signal, attr="connect"), args=[ast.Name(id=name), *_]):
                if dotted := _signal(module, signal):
                    yield name, dotted
            case ast.Call(args=[*named, ast.Name(id=name)]) if found := _hook(module, node.func, named):
                yield name, found


def _hook(module: Module, function: ast.expr, arguments: list[ast.expr]) -> str:
    called = _imported(module, function)
    if called == "django.dispatch.receiver" and arguments:
        signals = arguments[0].elts if isinstance(arguments[0], ast.List | ast.Tuple) else [arguments[0]]
        return next((found for one in signals if (found := _signal(module, one))), "")
    if called.startswith("sqlalchemy.event.") and called.endswith((".listens_for", ".listen")):
        for one in arguments:
            if isinstance(one, ast.Constant) and one.value in (*_EVENTS, AFTER_COMMIT):
                return str(one.value)
    return ""


def _signal(module: Module, node: ast.expr) -> str:
    dotted = _imported(module, node)
    return dotted.rpartition(".")[2] if dotted in _SIGNALS else ""


def _imported(module: Module, node: ast.expr) -> str:
    names = module.project.names(module.path)
    root, dot, rest = (path_of(node) or "").partition(".")
    return names.imports.get(root, "") + dot + rest if names and root in names.imports else ""


@dataclass(frozen=True)
class Done:
    """A step with its effects."""

    step: Step
    effect: Effect

    @property
    def writes_at_once(self) -> bool:
        """Whether its rows are committed when it ends."""
        committed = self.effect.commits or self.effect.statement
        return self.effect.writes is not None and committed

    @property
    def is_both(self) -> bool:
        """Whether the function that it calls is a place of its own."""
        return self.effect.publishes is not None and (self.effect.writes is not None or self.effect.commits)


def beside_commit(story: Story, module: Module, effects: Effects) -> Iterator[RuleFinding]:
    """Yield messages after a commit, and messages before a commit that does not include them."""
    done = steps(story, module, effects)
    if is_relay(story) or not any(one.effect.publishes for one in done):
        return
    reported = {id(node) for _, node, _ in before_commit(story, module, effects)}
    reported |= {id(node) for _, node, _ in in_hook(story, module, effects)}
    is_hook = hook_of(story, module) != ""
    for one in done:
        publish = one.step
        if one.effect.publishes is None or one.is_both or id(publish.node) in reported:
            continue
        where = sent_by(publish, story, module, effects)
        if is_hook or is_after_commit(publish):
            yield APART, publish.node, f"a crash after the commit loses the message{where}"
        elif block := block_of(publish, story, module, effects):
            line = getattr(block.node, "lineno", 0)
            yield (
                APART,
                publish.node,
                f"the task is queued even if the transaction of line {line} rolls back{where}",
            )
        elif line := _committed_before(publish, done):
            yield APART, publish.node, f"a crash after the commit of line {line} loses the message{where}"
        elif line := _committed_behind(publish, done):
            yield APART, publish.node, f"the message is sent even if line {line} fails{where}"


def steps(story: Story, module: Module, effects: Effects) -> list[Done]:
    """Return the steps that write, commit or publish."""
    found = (Done(step, effects.of_step(step, story, module.path)) for step in story.steps)
    return [one for one in found if one.effect != Effect()]


def _committed_before(publish: Step, done: list[Done]) -> int:
    """The line of a commit, or of a write that is committed at once, after which it comes."""
    for one in done:
        if one.is_both or not follows(publish, one.step):
            continue
        if one.writes_at_once and not _shares_a_block(one.step, publish):
            return one.step.node.lineno
        if _is_commit(one) and any(_goes_before(write, one) for write in done):
            return one.step.node.lineno
    return 0


def _committed_behind(publish: Step, done: list[Done]) -> int:
    """The line of a write behind it that is committed, and not in a transaction around both."""
    for one in done:
        if one.is_both or not follows(one.step, publish):
            continue
        if one.writes_at_once and not _shares_a_block(one.step, publish):
            return one.step.node.lineno
        if _is_commit(one) and any(
            write.effect.writes and follows(write.step, publish) and _goes_before(write, one)
            for write in done
        ):
            return one.step.node.lineno
    return 0


def _is_commit(one: Done) -> bool:
    return one.effect.commits and (one.step.act is Act.COMMIT or one.step.act is Act.CALL)


def _goes_before(write: Done, commit: Done) -> bool:
    """Return whether a commit ends what was written, or is known to end a change made elsewhere."""
    if commit.step.act is Act.COMMIT and not commit.step.implicit and commit.step.thing is not None:
        return True
    return write.effect.writes is not None and (write.step is commit.step or follows(commit.step, write.step))


def _shares_a_block(write: Step, publish: Step) -> bool:
    """Return whether both are in one transaction, which is another rule's."""
    return is_statement(write) is False and any(
        one.shelter is Shelter.TRANSACTION and one in publish.around for one in write.around
    )


_ORDERS: Final = {
    "OB006": "publishes before the commit",
    "OB010": "publishes while the row is saved",
    "OB011": "publishes apart from the commit",
}


@dataclass(frozen=True, order=True)
class DualWrite:
    """A function that writes and publishes, with the lines of both and the places they lead to."""

    path: str
    line: int
    function: str
    order: str
    writes: list[str]
    publishes: list[str]


def dual_writes(read: Read) -> list[DualWrite]:
    """Return all places, in order."""
    found = (
        dual_write
        for module in read.modules.values()
        for story in module.stories
        if (dual_write := _dual_write(story, module, read)) is not None
    )
    return sorted(found)


def _dual_write(story: Story, module: Module, read: Read) -> DualWrite | None:
    done = steps(story, module, read.effects)
    published = [one for one in done if one.effect.publishes and not one.is_both]
    written = [one for one in done if (one.effect.writes or one.effect.commits) and not one.is_both]
    hook = hook_of(story, module)
    if not published or not (written or hook) or is_relay(story):
        return None
    codes = {
        rule.code
        for look in (before_commit, in_hook, beside_commit)
        for rule, _, _ in look(story, module, read.effects)
    }
    line = getattr(story.node, "lineno", 1)
    order = "; ".join(f"{_ORDERS[code]} ({code})" for code in sorted(codes)) or "order unknown"
    writes = [_line(one, one.effect.writes) for one in written] or [f"{hook}: the row that is saved"]
    return DualWrite(
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
