"""Messages sent while an ORM saves a row: from signals of Django, events of SQLAlchemy, `save()` of a model.

Invariants:
- A hook cannot know whether the row's transaction will commit: the message is sent in any case.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from outbox_pipelines.lint.effects import Effects
from outbox_pipelines.lint.finding import IN_HOOK
from outbox_pipelines.lint.libraries import Library
from outbox_pipelines.lint.methods import ROW_WRITES
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.names import path_of
from outbox_pipelines.lint.publishing import is_after_commit, is_relay, told
from outbox_pipelines.lint.story import Act, Step, Story
from outbox_pipelines.lint.transactions import Found

_SIGNALS: Final = {
    f"django.db.models.signals.{when}_{what}" for when in ("pre", "post") for what in ("save", "delete")
} | {"django.db.models.signals.m2m_changed"}
_EVENTS: Final = {
    f"{when}_{what}" for when in ("before", "after") for what in ("insert", "update", "delete", "flush")
} | {"before_commit", "after_flush_postexec"}
AFTER_COMMIT: Final = "after_commit"


def in_hook(story: Story, module: Module, effects: Effects) -> Iterator[Found]:
    """Yield publishes in a hook."""
    hook = hook_of(story, module)
    if hook in ("", AFTER_COMMIT) or is_relay(story):
        return
    for step in story.steps:
        if is_message(step, story, module, effects) and not is_after_commit(step):
            why = f"{hook} runs before the row's transaction commits; the message is sent even on rollback"
            yield IN_HOOK, step.node, why + told(step, story, module, effects)


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
