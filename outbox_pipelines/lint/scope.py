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
from outbox_pipelines.lint.libraries import Library, Role, Thing
from outbox_pipelines.lint.methods import ENTERING
from outbox_pipelines.lint.names import path_of
from outbox_pipelines.lint.statements import text_of

# A text that is put together of itself doubles each time; no statement is so long.
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


def entered(thing: Thing | None) -> Thing | None:
    """What `with … as` gives of a context manager."""
    return thing.yields if thing and thing.role is Role.TRANSACTION else thing


@dataclass(frozen=True)
class Known:
    """What the whole module says: imports, aliases, what local functions return, models of the outbox."""

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
        self.things = {
            path: thing if all(other.things.get(path) == thing for other in others) else None
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
        for other in [known for known in self.things if known.startswith(f"{path}.")]:
            del self.things[other]
        self.things[path] = thing
        self.texts.pop(path, None)
        if text is not None:
            self.texts[path] = text

    def set_autocommit(self, origin: str, autocommit: bool | None) -> None:
        """A connection was switched, by whatever name it is known."""
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
        return self.known.imports[root] + dot + rest

    def is_model(self, node: ast.expr) -> bool:
        """Whether it names an application's own model of the outbox."""
        path = path_of(node)
        if path is None or path.rpartition(".")[2] not in self.known.models:
            return False
        return not (self.qualified(node) or "").startswith(_OWN)

    def is_outbox(self, node: ast.expr) -> bool:
        """Whether it names a model of the outbox, the application's own or ours."""
        name = self.qualified(node) or ""
        return self.is_model(node) or (name.startswith(_OWN) and name.endswith(f".{_OWN_MODEL}"))

    def evaluate(self, node: ast.expr) -> Thing | None:
        """What an expression gives, where that is known."""
        match node:
            case ast.Name() | ast.Attribute():
                return self._named(node)
            case ast.Await(value=inner) | ast.NamedExpr(value=inner) | ast.Starred(value=inner):
                return self.evaluate(inner)
            case ast.Subscript(value=inner):
                found = self.evaluate(inner)
                return found if found and found.library is Library.DJANGO else None
            case ast.BoolOp(values=values):
                return next((thing for value in values if (thing := self.evaluate(value))), None)
            case ast.Call():
                return self._called(node)
        return None

    def _named(self, node: ast.Name | ast.Attribute) -> Thing | None:
        path = path_of(node) or ""
        if path in self.things:
            return self.things[path]
        if (name := self.qualified(node)) in libraries.OBJECTS:
            return libraries.OBJECTS[name or ""]
        if isinstance(node, ast.Attribute) and node.attr in ("connection", "sync_session"):
            owner = self.evaluate(node.value)
            return owner if owner and owner.is_target else None
        return None

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
            return self.annotated(self.known.returns[call.func.id], origin)
        if thing := self.evaluate(call.func):
            return libraries.of_method(thing, call, "__call__", origin)
        if isinstance(call.func, ast.Attribute) and call.func.attr in ENTERING and call.args:
            return entered(self.evaluate(call.args[0]))
        if isinstance(call.func, ast.Attribute) and (thing := self.evaluate(call.func.value)):
            return libraries.of_method(thing, call, call.func.attr, origin)
        return None

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
                return template and replace(template, autocommit=None, origin=origin)
        return None

    def text(self, node: ast.expr) -> str | None:
        """The text of an expression, where that is known."""
        text = text_of(node, self.texts)
        return text if text is not None and len(text) <= _LONGEST else None
