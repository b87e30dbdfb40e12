"""Event types in code, compared with the event catalog: those it does not have, and those that no code names.

Invariants:
- A type is judged only where its text is in sight: a literal, a constant, or a class with `__event_type__`.
- A call whose type is not in sight is listed, and is no mistake. A typed event is judged where it is made.
- A type that any text of the code names, except in a consumer's `on`, counts as written: a helper may
  write it.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from outbox_pipelines.lint.finding import HIDDEN, NOT_WRITTEN, UNDOCUMENTED, Finding, at
from outbox_pipelines.lint.project import Project
from outbox_pipelines.lint.syntax import keyword, path_of

# By the name of a function or class of the writer, the place of the event type among its arguments.
_PLACES: Final = {"emit": 3, "NewEvent": 2, "OutboxEvent": 2}
# The place of an event in their stead.
_EVENTS: Final = {"emit": 1, "OutboxEvent": 0}
_RECORDING: Final = "outbox_pipelines.writer.sqlalchemy"
_RELEVANT: Final = re.compile(rb"outbox|\.record\(")
_TYPE: Final = "__event_type__"


@dataclass(frozen=True)
class Documented:
    """The event catalog, as far as code is compared with it."""

    path: str
    text: str
    lifecycles: Mapping[str, str]
    """Of each event type."""


def review(sources: Mapping[str, bytes], project: Project, catalog: Documented) -> Iterator[Finding]:
    """Yield what differs between the code and the event catalog."""
    named: set[str] = set()
    trees = {path: names.tree for path in sources if (names := project.names(path)) is not None}
    words = {name.encode() for tree in trees.values() for name in _classes(tree)}
    concerned = re.compile(b"|".join([_RELEVANT.pattern, *map(re.escape, sorted(words))]))
    for path, tree in trees.items():
        with contextlib.suppress(RecursionError):
            named |= _texts(tree)
            if concerned.search(sources[path]):
                file = _File(path, project, catalog, has_classes=bool(words))
                file.visit(tree, frozenset())
                named |= file.named
                yield from file.findings
    for event_type, lifecycle in catalog.lifecycles.items():
        if lifecycle == "active" and event_type not in named:
            yield _not_written(catalog, event_type)


def _not_written(catalog: Documented, event_type: str) -> Finding:
    entry = re.compile(rf"""\s+(['"]?){re.escape(event_type)}\1\s*:""")
    lines = catalog.text.splitlines()
    line = next((number for number, each in enumerate(lines, 1) if entry.match(each)), 1)
    why = f"no code names {event_type}"
    rule = NOT_WRITTEN
    return Finding(catalog.path, line, 1, rule.code, rule.name, why, rule.remedy, line)


def _classes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and _own_type(node) is not None:
            yield node.name


def _own_type(node: ast.ClassDef) -> ast.expr | None:
    """Return what a class sets `__event_type__` to."""
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == _TYPE:
                return value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name == _TYPE:
                return value
    return None


def _texts(tree: ast.Module) -> set[str]:
    """Return the texts of a file, without those of `@consumer.on(…)`, and of `__event_type__` in classes."""
    found, waiting = set(), list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "on":
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        is_type = (
            isinstance(node, ast.Assign | ast.AnnAssign) and _TYPE in ast.unparse(node).partition("=")[0]
        )
        waiting += [] if is_type else ast.iter_child_nodes(node)
    return found


class _File:
    """The event types that a file writes."""

    def __init__(self, path: str, project: Project, catalog: Documented, *, has_classes: bool) -> None:
        names = project.names(path)
        assert names is not None
        self._path = path
        self._names = names
        self._project = project
        self._catalog = catalog
        self._has_classes = has_classes
        self.named: set[str] = set()
        self.findings: list[Finding] = []

    def visit(self, node: ast.AST, bound: frozenset[str], owner: str = "") -> None:
        """Read a node and what is in it; `bound` are the names that functions around it bind."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            bound |= set(_bound(node))
        elif isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, ast.Call):
            self._call(node, bound, owner)
        for child in ast.iter_child_nodes(node):
            self.visit(child, bound, owner)

    def _call(self, call: ast.Call, bound: frozenset[str], owner: str) -> None:
        name = self._of_writer(call.func, bound)
        place = _PLACES.get(name)
        if place is not None:
            given = keyword(call, "event_type") or _argument(call, place)
            event = _argument(call, _EVENTS[name]) if name in _EVENTS else None
            if given is not None:
                self._judge(call, self._text(given, self._path, bound))
            elif event is not None and not self._has_classes:
                self._judge(call, None)
        elif (kind := self._class(call.func, bound)) is not None:
            self._judge(call, self._type_of(kind))
        elif self._records(call, owner) and isinstance(first := _argument(call, 0), ast.Constant):
            self._judge(call, [str(first.value)])

    def _judge(self, call: ast.Call, event_types: list[str] | None) -> None:
        if event_types is None:
            self.findings.append(at(self._path, call, HIDDEN, "the text of the event type is not in sight"))
        for event_type in event_types or ():
            self.named.add(event_type)
            lifecycle = self._catalog.lifecycles.get(event_type)
            if lifecycle in (None, "retired"):
                why = "not in the event catalog" if lifecycle is None else "retired in the event catalog"
                self.findings.append(at(self._path, call, UNDOCUMENTED, f"{event_type} is {why}"))

    def _of_writer(self, function: ast.expr, bound: frozenset[str]) -> str:
        """Return the name of a function or class of the writer; empty for any other."""
        root, dot, rest = (path_of(function) or "").partition(".")
        if root in bound or root not in self._names.imports:
            return ""
        imported = self._names.imports[root] + dot + rest
        package, _, name = self._project.original(self._path, imported).rpartition(".")
        return name if package.startswith("outbox_pipelines") else ""

    def _defined(self, node: ast.expr, path: str, bound: frozenset[str]) -> tuple[str, str] | None:
        """Return the file in which a name is defined, and its name there."""
        dotted, names = path_of(node), self._project.names(path)
        if dotted is None or names is None:
            return None
        root, dot, rest = dotted.partition(".")
        if root in bound:
            return None
        if root in names.imports:
            found = self._project.definition(path, names.imports[root] + dot + rest)
            return None if found is None else (found.path, found.name)
        return path, dotted

    def _class(self, node: ast.expr, bound: frozenset[str]) -> str | None:
        """Return the key of a typed event's class."""
        found = self._defined(node, self._path, bound)
        key = f"{found[0]}::{found[1]}" if found else ""
        return key if key and any(self._own_type(each) is not None for each in self._family(key)) else None

    def _family(self, key: str) -> list[str]:
        return [each for each in self._project.family(key) if "::" in each]

    def _own_type(self, key: str) -> ast.expr | None:
        path, _, name = key.partition("::")
        names = self._project.names(path)
        node = names.classes.get(name) if names else None
        return _own_type(node) if node else None

    def _type_of(self, key: str) -> list[str] | None:
        for each in self._family(key):
            if (value := self._own_type(each)) is not None:
                return self._text(value, each.partition("::")[0], frozenset())
        return None

    def _records(self, call: ast.Call, owner: str) -> bool:
        return path_of(call.func) == "self.record" and self._project.derives(
            f"{self._path}::{owner}", _RECORDING
        )

    def _text(self, node: ast.expr, path: str, bound: frozenset[str]) -> list[str] | None:
        """Return the texts that an expression can be; None if they are not in sight."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.IfExp(body=body, orelse=orelse):
                some, others = (self._text(each, path, bound) for each in (body, orelse))
                return None if some is None or others is None else some + others
            case ast.Attribute(value=ast.Attribute() as member, attr="value"):
                return self._text(member, path, bound)
            case ast.Name() | ast.Attribute():
                found = self._defined(node, path, bound)
                value = self._assigned(*found) if found else None
                return self._text(value, found[0], frozenset()) if found and value is not None else None
        return None

    def _assigned(self, path: str, dotted: str) -> ast.expr | None:
        """Return what a name, or an attribute of a class, is set to; None if that is not once."""
        owner, _, name = dotted.rpartition(".")
        names = self._project.names(path)
        body = names and (names.classes[owner].body if owner in names.classes else names.tree.body)
        found: list[ast.expr] = []
        for statement in body or ():
            match statement:
                case ast.Assign(targets=[ast.Name(id=one)], value=value) if one == name:
                    found.append(value)
                case ast.AnnAssign(target=ast.Name(id=one), value=ast.expr() as value) if one == name:
                    found.append(value)
        # A name that stands for itself has no end.
        return found[0] if len(found) == 1 and isinstance(found[0], ast.Constant) else None


def _argument(call: ast.Call, place: int) -> ast.expr | None:
    given = call.args[: place + 1]
    is_there = len(given) > place and not any(isinstance(each, ast.Starred) for each in given)
    return given[place] if is_there else None


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
