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

from outbox_pipelines.lint.libraries import CALLS, TYPES, Library, Role, Thing
from outbox_pipelines.lint.project import Facts, Project
from outbox_pipelines.lint.scope import Known, Scope
from outbox_pipelines.lint.story import Act, Around, Shelter, Step, Story
from outbox_pipelines.lint.syntax import path_of, statements
from outbox_pipelines.lint.walk import Function, Walk

_ATOMIC: Final = CALLS["django.db.transaction.atomic"]


@dataclass
class Module:
    """The stories of a module, its own body first."""

    facts: Facts
    project: Project
    path: str
    tree: ast.Module
    stories: list[Story] = field(default_factory=list)
    shared: dict[str, Thing] = field(default_factory=dict)
    """What its names are to those who import them."""
    attributes: dict[str, dict[str, Thing]] = field(default_factory=dict)
    """Of each class, what its objects' attributes are."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Functions that an ORM calls, and when."""
    scope: Scope | None = None
    _previewed: set[str] = field(default_factory=set)

    def returned(self, name: str) -> Thing | None:
        """What a function, or a method as ``Class.method``, gives back."""
        origin = f"{self.path}::{name}()"
        node = self.project.function(f"{self.path}::{name}")
        if node is not None and node.returns is not None and self.scope is not None:
            found = self.scope.annotated(node.returns, origin)
            if found is not None:
                return replace(found, shared=True)
        story = self.story(name) or self._preview(name)
        given = story.returned[0] if story and story.returned else None
        return given and replace(
            given, origin=given.origin if given.role is Role.PRODUCER else origin, shared=True
        )

    def _preview(self, name: str) -> Story | None:
        """The story of a function that stands further down in a file which is being read."""
        node = self.project.function(f"{self.path}::{name}")
        if node is None or "." in name or self.scope is None or name in self._previewed:
            return None
        self._previewed.add(name)
        return _Reader(Module(self.facts, self.project, self.path, self.tree)).preview(node, self.scope)

    def story(self, name: str) -> Story | None:
        """The story of a function, or of a method as ``Class.method``."""
        return next((one for one in self.stories if one.key == name), None)

    def producers(self) -> set[str]:
        """Names under which other modules can import a producer of messages, or its type."""
        if self.scope is None:
            return set()
        known = self.scope.known
        found = {name for name, thing in self.shared.items() if _is_producer(thing)}
        found |= {name for name, one in known.aliases.items() if _is_producer(self.scope.annotated(one, ""))}
        imported = {name: known.project.original(self.path, dotted) for name, dotted in known.imports.items()}
        return found | {name for name, dotted in imported.items() if _is_producer(TYPES.get(dotted))}

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


def _is_producer(thing: Thing | None) -> bool:
    return thing is not None and thing.role is Role.PRODUCER and thing.library is not Library.CELERY


def read(tree: ast.Module, project: Project, path: str) -> Module:
    """The stories of a parsed module.

    Raises:
        RecursionError: it is nested too deeply.
    """
    facts = project.facts
    names = project.names(path)
    known = Known(
        project,
        path,
        names.imports if names else {},
        dict(_aliases(tree)),
        dict(_returns(tree)),
        facts.models,
    )
    reader = _Reader(Module(facts, project, path, tree))
    # Others may ask for it while it is being read.
    project.modules[path] = reader.read
    reader.module(tree, Scope(known))
    return reader.read


def models(tree: ast.Module) -> Iterator[str]:
    """Names of classes that are mapped to the outbox's table, by SQLAlchemy or Django."""
    for node in statements(tree):
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
        self.read.scope = scope
        walk.body(tree.body)
        for name, value in _globals(tree):
            if scope.things.get(name) is None and (thing := scope.evaluate(value)):
                scope.things[name] = thing
        self.read.scope = walk.scope
        self.read.shared = {
            name: replace(thing, shared=True, origin=thing.origin and f"{self.read.path}:{thing.origin}")
            for name, thing in walk.scope.things.items()
            if thing and thing.role not in (Role.CLASS, Role.FUNCTION)
        }
        self.read.stories.append(walk.story)
        self._inside(walk)

    def preview(self, node: Function, scope: Scope) -> Story:
        """Return the story of one function, without its callers."""
        return self._function(node, scope.enclosed(), None).story

    def _inside(self, walk: Walk) -> None:
        scope = walk.scope.enclosed()
        # Classes first: functions anywhere may use their constants.
        for node in walk.inner:
            if isinstance(node, ast.ClassDef):
                self._class(node, scope, walk_of_module=isinstance(walk.story.node, ast.Module))
        for node in walk.inner:
            if isinstance(node, Function):
                self._inside(self._function(node, scope, walk.story.owner))

    def _class(self, node: ast.ClassDef, scope: Scope, *, walk_of_module: bool = False) -> None:
        body = Walk(scope.copy(), Story(node.name, node, node))
        body.body(node.body)
        methods = [inner for inner in body.inner if isinstance(inner, Function)]
        texts = {name: text for name, text in body.scope.texts.items() if scope.texts.get(name) != text}
        scope.texts |= {f"{node.name}.{name}": text for name, text in texts.items()}
        scope = self._with_attributes(node, scope, body.scope.things)
        scope.texts |= {f"{me}.{name}": text for name, text in texts.items() for me in ("self", "cls")}
        if walk_of_module:
            key = f"{self.read.path}::{node.name}"
            scope.things["self"] = scope.instance(key, "self")
        for path, thing in _agreed([self._function(method, scope, node, keeps=False) for method in methods]):
            scope.things[path] = thing
        if walk_of_module:
            self.read.attributes[node.name] = {
                path.removeprefix("self."): replace(thing, origin=f"{key}.{path}")
                for path, thing in scope.things.items()
                if thing and path.startswith("self.")
            }
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

    def _bind_serializer(self, node: Function, scope: Scope) -> None:
        """The REST framework gives its views a serializer, or a row to delete."""
        own = scope.things["self"]
        if own and scope.known.project.derives(own.key, "rest_framework.") and len(node.args.args) > 1:
            row = Thing(Role.OBJECT, Library.DJANGO, key="rest_framework.serializers.ModelSerializer")
            scope.things[node.args.args[1].arg] = row

    def _function(
        self, node: Function, outer: Scope, owner: ast.ClassDef | None, *, keeps: bool = True
    ) -> Walk:
        scope = outer.copy()
        defaults = dict(_defaults(node))
        for parameter in _parameters(node):
            if parameter.arg == "cls" and owner and f"{self.read.path}::{owner.name}" == _own_key(scope):
                scope.things["cls"] = Thing(Role.CLASS, key=_own_key(scope))
            elif parameter.arg != "self":
                origin = f"{node.lineno}:{parameter.arg}"
                scope.bind(parameter.arg, scope.given(parameter, defaults.get(parameter.arg), origin))
        if owner and node.name.startswith("perform_") and scope.things.get("self"):
            self._bind_serializer(node, scope)
        walk = Walk(scope, Story(node.name, node, owner))
        if self._is_decorated(node, scope) or (owner and _is_atomic(owner.decorator_list)):
            walk.around = (Around(Shelter.TRANSACTION, _ATOMIC, node),)
        walk.body(node.body)
        for decorator in node.decorator_list:
            walk.publishes_result(decorator)
        if keeps:
            self.read.stories.append(walk.story)
        return walk

    def _is_decorated(self, node: Function, scope: Scope) -> bool:
        """Whether a decorator opens a transaction, by its name or by what the application's own one does."""
        if _is_atomic(node.decorator_list):
            return True
        for decorator in node.decorator_list:
            thing = scope.evaluate(decorator.func if isinstance(decorator, ast.Call) else decorator)
            own = self.read.project.function(thing.key) if thing and thing.role is Role.FUNCTION else None
            blocks = [one for one in statements(own) if isinstance(one, ast.With)] if own else []
            if any(_is_atomic([item.context_expr for item in block.items]) for block in blocks):
                return True
        return False


def _own_key(scope: Scope) -> str:
    own = scope.things.get("self")
    return own.key if own else ""


def _globals(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """What functions set names of the module to, that begin as None."""
    for node in statements(tree):
        if isinstance(node, Function):
            inner = list(statements(node))
            named = {name for one in inner if isinstance(one, ast.Global) for name in one.names}
            for one in inner if named else ():
                match one:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in named:
                        yield name, value


def _defaults(node: Function) -> Iterator[tuple[str, ast.expr]]:
    given = [*node.args.posonlyargs, *node.args.args]
    if node.args.defaults:
        yield from zip(
            (one.arg for one in given[-len(node.args.defaults) :]), node.args.defaults, strict=True
        )
    for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if default is not None:
            yield one.arg, default


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
