"""One module of an application: its functions' stories, with what they know of each other.

Invariants:
- An attribute `self.x` is what the methods agree to set it to; of a base class in the module, too.
- Connections that several functions reach are marked as shared: a caller may have a transaction open on them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from outbox_pipelines.lint.libraries import CALLS, Thing
from outbox_pipelines.lint.names import imports, path_of
from outbox_pipelines.lint.scope import Known, Scope
from outbox_pipelines.lint.story import Act, Around, Shelter, Step, Story
from outbox_pipelines.lint.walk import Function, Walk

_ATOMIC: Final = CALLS["django.db.transaction.atomic"]


@dataclass(frozen=True)
class Facts:
    """What the files of an application say together, and what the command was told."""

    uses_writer: bool = False
    atomic_requests: bool = False
    models: frozenset[str] = frozenset()


@dataclass
class Module:
    """The stories of a module, its own body first."""

    facts: Facts
    stories: list[Story] = field(default_factory=list)

    @property
    def opened(self) -> set[str]:
        """Origins of the connections on which this module opens a transaction somewhere."""
        blocks = {
            one.thing.origin
            for story in self.stories
            for step in story.steps
            for one in step.around
            if one.thing and one.shelter is Shelter.TRANSACTION
        }
        begun = {step.thing.origin for story in self.stories for step in story.of(Act.BEGIN) if step.thing}
        return blocks | begun

    def ends(self, story: Story, thing: Thing) -> list[Step]:
        """Steps that may end the transaction of a thing: by any name, or in a function of this module."""
        committing = {one.called_as for one in self.stories if one.of(Act.COMMIT)}
        unknown = [step for step in story.of(Act.COMMIT) if step.thing is None]
        calls = [step for step in story.of(Act.CALL) if step.name in committing]
        return [*story.on(thing, Act.COMMIT, Act.ROLLBACK), *unknown, *calls]

    @property
    def called(self) -> set[str]:
        """Names of functions, and of methods as ``self.name``, that this module calls."""
        return {step.name for story in self.stories for step in story.of(Act.CALL)}


def read(tree: ast.Module, facts: Facts) -> Module:
    """The stories of a parsed module.

    Raises:
        RecursionError: it is nested too deeply.
    """
    known = Known(imports(tree), dict(_aliases(tree)), dict(_returns(tree)), facts.models)
    reader = _Reader(Module(facts))
    reader.module(tree, Scope(known))
    return reader.read


def models(tree: ast.Module) -> Iterator[str]:
    """Names of classes that are mapped to the outbox's table, by SQLAlchemy or Django."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            inner = [meta for meta in node.body if isinstance(meta, ast.ClassDef) and meta.name == "Meta"]
            named = [
                *_assigned(node, "__tablename__"),
                *(one for meta in inner for one in _assigned(meta, "db_table")),
            ]
            if any(isinstance(value, ast.Constant) and value.value == "outbox" for value in named):
                yield node.name


def _assigned(node: ast.ClassDef, name: str) -> Iterator[ast.expr]:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                yield value


def _aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() as value):
                yield name, value


def _returns(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, Function) and node.returns is not None:
            yield node.name, node.returns


class _Reader:
    def __init__(self, read: Module) -> None:
        self.read = read
        self._attributes: dict[str, Scope] = {}

    def module(self, tree: ast.Module, scope: Scope) -> None:
        walk = Walk(scope, Story("", tree))
        walk.body(tree.body)
        self.read.stories.append(walk.story)
        self._inside(walk)

    def _inside(self, walk: Walk) -> None:
        scope = walk.scope.enclosed()
        # Classes first: functions anywhere may use their constants.
        for node in walk.inner:
            if isinstance(node, ast.ClassDef):
                self._class(node, scope)
        for node in walk.inner:
            if isinstance(node, Function):
                self._inside(self._function(node, scope, walk.story.owner))

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        body = Walk(scope.copy(), Story(node.name, node, node))
        body.body(node.body)
        methods = [inner for inner in body.inner if isinstance(inner, Function)]
        texts = {name: text for name, text in body.scope.texts.items() if scope.texts.get(name) != text}
        scope.texts |= {f"{node.name}.{name}": text for name, text in texts.items()}
        scope = self._with_attributes(node, scope, body.scope.things)
        scope.texts |= {f"{me}.{name}": text for name, text in texts.items() for me in ("self", "cls")}
        for path, thing in _agreed([self._function(method, scope, node, told=False) for method in methods]):
            scope.things[path] = thing
        self._attributes[node.name] = scope
        for method in methods:
            self._inside(self._function(method, scope, node))
        for inner in body.inner:
            if isinstance(inner, ast.ClassDef):
                self._class(inner, scope)

    def _with_attributes(self, node: ast.ClassDef, scope: Scope, body: Mapping[str, Thing | None]) -> Scope:
        """What is known in its methods: what bases of this module set, and what its own body declares."""
        scope = scope.copy()
        for base in node.bases:
            if inherited := self._attributes.get(path_of(base) or ""):
                scope.things = inherited.things | scope.things
                scope.texts = inherited.texts | scope.texts
        for name, thing in body.items():
            if thing and scope.things.get(name) != thing:
                scope.things[f"self.{name}"] = replace(thing, origin=f"self.{name}", shared=True)
        return scope

    def _function(
        self, node: Function, outer: Scope, owner: ast.ClassDef | None, *, told: bool = True
    ) -> Walk:
        scope = outer.copy()
        for parameter in _parameters(node):
            if parameter.arg != "self":
                origin = f"{node.lineno}:{parameter.arg}"
                scope.bind(parameter.arg, scope.annotated(parameter.annotation, origin))
        walk = Walk(scope, Story(node.name, node, owner))
        if _is_atomic(node.decorator_list) or (owner and _is_atomic(owner.decorator_list)):
            walk.around = (Around(Shelter.TRANSACTION, _ATOMIC, node),)
        walk.body(node.body)
        if told:
            self.read.stories.append(walk.story)
        return walk


def _parameters(node: Function) -> list[ast.arg]:
    given = node.args
    return [
        *given.posonlyargs,
        *given.args,
        *given.kwonlyargs,
        *(one for one in (given.vararg, given.kwarg) if one),
    ]


def _agreed(walks: Sequence[Walk]) -> Iterator[tuple[str, Thing]]:
    """Attributes with what they are set to, where all that is known of it agrees."""
    found: dict[str, list[Thing]] = {}
    for walk in walks:
        for path, thing in walk.attributes.items():
            if thing:
                found.setdefault(path, []).append(replace(thing, shared=True))
    for path, (first, *others) in found.items():
        if all(replace(other, origin=first.origin) == first for other in others):
            yield path, first


def _is_atomic(decorators: list[ast.expr]) -> bool:
    """Whether a decorator opens a transaction, by what it says: `transaction.atomic`, `transactional` …"""
    return any("atomic" in text or "transaction" in text for text in map(ast.unparse, decorators))
