"""What the names of a function mean at one point of it: things, texts, imports.

Invariants:
- A name that is bound in sight to something unknown means nothing, whatever was imported under it.
- Where branches meet, only what all of them agree on is known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from outbox_pipelines.lint import libraries
from outbox_pipelines.lint.libraries import ENTERING, MANAGER_ROWS, Library, Role, Thing
from outbox_pipelines.lint.project import Project
from outbox_pipelines.lint.syntax import path_of, text_of

# A text that is concatenated with itself doubles each time; no statement is longer than this.
_LONGEST: Final = 50_000
_OWN: Final = "outbox_pipelines."
_OWN_MODEL: Final = "OutboxEvent"
# Annotations that stand for what is in their brackets, of local functions that are context managers too.
_CONTAINERS: Final = {
    "Optional",
    "Annotated",
    "Final",
    "ClassVar",
    "Iterator",
    "AsyncIterator",
    "Generator",
    "AsyncGenerator",
    "AbstractContextManager",
    "AbstractAsyncContextManager",
}
# A handler of any other class is a decision about that error.
_BROAD: Final = {
    "Exception",
    "BaseException",
    "outbox_pipelines.writer.OutboxError",
    "outbox_pipelines.writer.AutocommitError",
    "psycopg.Error",
    "asyncpg.PostgresError",
    "sqlalchemy.exc.SQLAlchemyError",
    "sqlalchemy.exc.DBAPIError",
    "django.db.Error",
    "django.db.DatabaseError",
}
_TELLING: Final = {
    "debug",
    "info",
    "warning",
    "warn",
    "error",
    "exception",
    "critical",
    "log",
    "print",
    "print_exc",
    "capture_exception",
    "capture_message",
}


def _instruments(name: str) -> bool:
    """Return whether a function gives back what it is given, with more around it: tracing, say."""
    return name.rpartition(".")[2].startswith(("instrument", "wrap"))


def _agree(one: Thing | None, other: Thing | None) -> bool:
    """Return whether two ways end with the same thing; a producer is a producer, wherever it was made."""
    if one is None or other is None or one.role not in (Role.PRODUCER, Role.OBJECT):
        return one == other
    return replace(one, origin="", shared=False) == replace(other, origin="", shared=False)


def entered(thing: Thing | None) -> Thing | None:
    """What `with … as` gives of a context manager."""
    return thing.yields if thing and thing.role is Role.TRANSACTION else thing


@dataclass(frozen=True)
class Known:
    """What the whole module says: imports, aliases, what local functions return, models of the outbox."""

    project: Project
    path: str
    imports: Mapping[str, str]
    aliases: Mapping[str, ast.expr]
    returns: Mapping[str, ast.expr]
    models: frozenset[str]


@dataclass
class Scope:
    """Names and dotted paths, such as ``self.connection``, with what is known of them."""

    known: Known
    things: dict[str, Thing | None] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    _evaluated: dict[ast.expr, Thing | None] = field(default_factory=dict)
    """Since the last name was bound: the parts of a chain of calls are asked for again and again."""

    def copy(self) -> Scope:
        """The same, for a branch."""
        return Scope(self.known, dict(self.things), dict(self.texts))

    def enclosed(self) -> Scope:
        """For functions inside: who calls them, and when, is not known."""
        shared = {path: thing and replace(thing, shared=True) for path, thing in self.things.items()}
        return Scope(self.known, shared, dict(self.texts))

    def meet(self, ends: Iterable[Scope]) -> None:
        """Becomes what is known after branches that ended so."""
        first, *others = ends
        self._evaluated = {}
        self.things = {
            path: thing if all(_agree(other.things.get(path), thing) for other in others) else None
            for path, thing in first.things.items()
        }
        self.things |= {path: None for other in others for path in other.things if path not in first.things}
        self.texts = {
            path: text
            for path, text in first.texts.items()
            if all(other.texts.get(path) == text for other in others)
        }

    def bind(self, path: str, thing: Thing | None, text: str | None = None) -> None:
        """A name or path means something else from here on."""
        self._evaluated = {}
        for other in [known for known in self.things if known.startswith(f"{path}.")]:
            del self.things[other]
        self.things[path] = thing
        self.texts.pop(path, None)
        if text is not None:
            self.texts[path] = text

    def set_autocommit(self, origin: str, autocommit: bool | None) -> None:
        """A connection was switched, by whatever name it is known."""
        self._evaluated = {}
        for path, thing in self.things.items():
            if thing and thing.origin == origin:
                self.things[path] = replace(thing, autocommit=autocommit)

    def qualified(self, node: ast.expr) -> str | None:
        """The dotted name that an expression was imported as."""
        path = path_of(node)
        if path is None:
            return None
        root, dot, rest = path.partition(".")
        if root in self.things or root not in self.known.imports:
            return None
        return self.known.project.original(self.known.path, self.known.imports[root] + dot + rest)

    def is_model(self, node: ast.expr) -> bool:
        """Return whether it names an application's own model of the outbox."""
        path = path_of(node)
        if path is None or path.rpartition(".")[2] not in self.known.models:
            return False
        return not (self.qualified(node) or "").startswith(_OWN)

    def is_outbox(self, node: ast.expr) -> bool:
        """Return whether it names a model of the outbox, the application's own or ours."""
        name = self.qualified(node) or ""
        return self.is_model(node) or (name.startswith(_OWN) and name.endswith(f".{_OWN_MODEL}"))

    def evaluate(self, node: ast.expr) -> Thing | None:
        """What an expression gives, where that is known."""
        if isinstance(node, ast.Name):
            return self._named(node)
        if node not in self._evaluated:
            self._evaluated[node] = self._evaluate(node)
        return self._evaluated[node]

    def _evaluate(self, node: ast.expr) -> Thing | None:
        match node:
            case ast.Attribute():
                return self._named(node)
            case ast.Await(value=inner) | ast.NamedExpr(value=inner) | ast.Starred(value=inner):
                return self.evaluate(inner)
            case ast.Subscript(value=inner):
                found = self.evaluate(inner)
                return found if found and found.library is Library.DJANGO else None
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                # A chain of Celery's signatures.
                both = (self.evaluate(left), self.evaluate(right))
                return next((one for one in both if one and one.is_signature), None)
            case ast.BoolOp(values=values):
                return next((thing for value in values if (thing := self.evaluate(value))), None)
            case ast.Call():
                return self._called(node)
        return None

    def _named(self, node: ast.Name | ast.Attribute) -> Thing | None:
        path = path_of(node) or ""
        if path in self.things:
            return self.things[path]
        if name := self.qualified(node):
            if name in libraries.OBJECTS:
                return libraries.OBJECTS[name]
            if name not in libraries.TYPES and (found := self.known.project.thing(self.known.path, name)):
                return found
        if isinstance(node, ast.Attribute) and (owner := self.evaluate(node.value)):
            return self._attribute(owner, node.attr)
        return None

    def _attribute(self, owner: Thing, name: str) -> Thing | None:
        project = self.known.project
        if (
            owner.role is Role.CLASS
            and name in ("objects", "_default_manager")
            and project.is_django_model(owner.key)
        ):
            return Thing(Role.MANAGER, Library.DJANGO, key=owner.key)
        return libraries.attribute(owner, name) or project.attribute(owner, name)

    def instance(self, key: str, origin: str) -> Thing:
        """An object of a class of the application."""
        is_row = self.known.project.is_django_model(key) or self.known.project.derives(
            key, "rest_framework.serializers."
        )
        return Thing(Role.OBJECT, Library.DJANGO if is_row else Library.OTHER, origin=origin, key=key)

    def _called(self, call: ast.Call) -> Thing | None:
        origin = f"{call.lineno}:{call.col_offset}"
        name = self.qualified(call.func) or ""
        if template := libraries.CALLS.get(name) or libraries.TYPES.get(name):
            arguments = [*call.args, *(given.value for given in call.keywords)]
            given = next((thing for one in arguments if (thing := self.evaluate(one))), None)
            return libraries.made(template, call, origin, given)
        if self.is_model(call.func):
            return Thing(Role.OUTBOX_ROW)
        if isinstance(call.func, ast.Name) and call.func.id in self.known.returns:
            found = self.annotated(self.known.returns[call.func.id], origin)
            if found is not None:
                return found
        if isinstance(call.func, ast.Name):
            if call.func.id in ("next", "anext", "iter") and call.args:
                return self.evaluate(call.args[0])
            if call.func.id == "super":
                return self._base()
        if (
            name in ("django.shortcuts.get_object_or_404", "django.shortcuts.aget_object_or_404")
            and call.args
        ):
            found = self.evaluate(call.args[0])
            is_row = found is not None and found.role in (Role.CLASS, Role.MANAGER)
            return self.instance(found.key, origin) if found and is_row else None
        if _instruments(name or (path_of(call.func) or "")):
            given = next((thing for one in call.args if (thing := self.evaluate(one))), None)
            if given and given.role is Role.PRODUCER:
                return given
        if thing := self.evaluate(call.func):
            if thing.role is Role.CLASS:
                return self.instance(thing.key, origin)
            if thing.role is Role.FUNCTION:
                return self.known.project.returned(thing.key)
            return libraries.of_method(thing, call, "__call__", origin)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ENTERING and call.args:
            return entered(self.evaluate(call.args[0]))
        if isinstance(call.func, ast.Attribute) and (thing := self.evaluate(call.func.value)):
            if thing.role is Role.MANAGER:
                return self.instance(thing.key, origin) if call.func.attr in MANAGER_ROWS else thing
            return libraries.of_method(thing, call, call.func.attr, origin)
        return None

    def _base(self) -> Thing | None:
        """What `super()` is: an object of the first base."""
        own = self.things.get("self")
        family = self.known.project.family(own.key) if own else ()
        if own is None or len(family) < 2:
            return None
        library = Library.DJANGO if self.known.project.derives(own.key, "rest_framework.") else own.library
        return replace(own, key=family[1], library=library)

    def annotated(
        self, annotation: ast.expr | None, origin: str, seen: frozenset[str] = frozenset()
    ) -> Thing | None:
        """What an annotation promises: its state is the caller's."""
        match annotation:
            case ast.Constant(value=str(text)):
                try:
                    return self.annotated(ast.parse(text, mode="eval").body, origin, seen)
                except SyntaxError:
                    return None
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.annotated(left, origin, seen) or self.annotated(right, origin, seen)
            case ast.Subscript(value=outer, slice=inner):
                if (path_of(outer) or "").rpartition(".")[2] not in _CONTAINERS:
                    return self.annotated(outer, origin, seen)
                first = inner.elts[0] if isinstance(inner, ast.Tuple) and inner.elts else inner
                return self.annotated(first, origin, seen)
            case ast.Name(id=name) if name in self.known.aliases and name not in seen:
                return self.annotated(self.known.aliases[name], origin, seen | {name})
            case ast.Name() | ast.Attribute():
                template = libraries.TYPES.get(self.qualified(annotation) or "")
                if template is not None:
                    return replace(template, autocommit=None, origin=template.origin or origin)
                alias = self.known.project.alias(self.known.path, self.qualified(annotation) or "")
                if alias is not None:
                    module, stands_for = alias
                    found: Thing | None = module.scope.annotated(stands_for, origin, seen)
                    return found
                named = self._named(annotation)
                return self.instance(named.key, origin) if named and named.role is Role.CLASS else None
        return None

    def given(self, parameter: ast.arg, default: ast.expr | None, origin: str) -> Thing | None:
        """What a parameter is: by its annotation, or by what FastAPI's `Depends` gets for it."""
        if (thing := self.annotated(parameter.annotation, origin)) is not None:
            return thing
        inner = [default]
        if isinstance(parameter.annotation, ast.Subscript) and isinstance(
            parameter.annotation.slice, ast.Tuple
        ):
            inner += parameter.annotation.slice.elts
        for one in inner:
            match one:
                case ast.Call(func=ast.Name(id="Depends") | ast.Attribute(attr="Depends"), args=[needed, *_]):
                    found = self.evaluate(needed)
                    if found and found.role is Role.FUNCTION:
                        got = self.known.project.returned(found.key)
                        return got and replace(got, origin=origin)
                    if found and found.role is Role.CLASS:
                        return self.instance(found.key, origin)
        return None

    def text(self, node: ast.expr) -> str | None:
        """The text of an expression, where that is known."""
        text = text_of(node, self.texts)
        return text if text is not None and len(text) <= _LONGEST else None


def swallows(handler: ast.ExceptHandler, scope: Scope) -> bool:
    """Return whether the handler catches any error and at most logs it."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(is_broad(error, scope) for error in caught) and all(map(_only_tells, handler.body))


def is_broad(error: ast.expr | None, scope: Scope) -> bool:
    """Return whether all errors of `emit` are of this class; None is the bare `except:`."""
    return error is None or (scope.qualified(error) or path_of(error)) in _BROAD


def _only_tells(node: ast.stmt) -> bool:
    match node:
        case ast.Pass() | ast.Continue() | ast.Return(value=None | ast.Constant(value=None)):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in _TELLING
    return False
