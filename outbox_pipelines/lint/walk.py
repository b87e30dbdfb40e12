"""Walks a function in the order of its source and writes its story.

Invariants:
- The body of a nested function or lambda is not part of the story: its callers are not known.
- A name's meaning is that of the point reached; branches are walked apart and meet behind.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from outbox_pipelines.lint.expressions import Expressions
from outbox_pipelines.lint.libraries import Library, Role, Thing
from outbox_pipelines.lint.scope import Scope, swallows
from outbox_pipelines.lint.story import Act, Arm, Around, Shelter, Story, ending
from outbox_pipelines.lint.syntax import path_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Walk(Expressions):
    """One walk; `inner` has the functions and classes met, `attributes` what ``self.…`` was set to."""

    def __init__(self, scope: Scope, story: Story) -> None:
        super().__init__(scope, story)
        self.inner: list[Function | ast.ClassDef] = []
        self.attributes: dict[str, Thing | None] = {}

    def body(self, statements: list[ast.stmt]) -> None:
        """Walks statements."""
        for statement in statements:
            self._statement(statement)

    def publishes_result(self, decorator: ast.expr) -> None:
        """What `@broker.publisher("topic")` of FastStream does with the result."""
        thing = self.scope.evaluate(decorator)
        if thing and thing.role is Role.PRODUCER and thing.library is not Library.CELERY:
            self.step(Act.PUBLISH, decorator, thing, implicit=True)

    def _is_unread(self, name: str) -> bool:
        """Return whether nothing reads this name of the function; names of modules can be imported."""
        if not isinstance(self.story.node, Function):
            return False
        return not any(
            name in node.names
            if isinstance(node, ast.Global | ast.Nonlocal)
            else isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            for node in ast.walk(self.story.node)
        )

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.scope.bind(node.name, self._defined(node))
                self.inner.append(node)
            case ast.Return(value=ast.expr() as value):
                self.expression(value)
                self.gives(value)
            case ast.Expr(value=value):
                self.expression(value, dropped=True)
            case ast.Assign(targets=[ast.Name(id="_")], value=value):
                self.expression(value, dropped=True)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as value) if self._is_emit(
                value
            ) and self._is_unread(name):
                self.expression(value, dropped=True)
            case ast.Assign(targets=targets, value=value):
                self.expression(value, bound=all(isinstance(target, ast.Name) for target in targets))
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                if value is not None:
                    self.expression(value, bound=True)
                self._bind(target, value, annotation)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                self.expression(value)
                self.scope.bind(name, None, self.scope.text(ast.BinOp(target, op, value)))
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                with self._entered(items):
                    self.body(body)
            case ast.If(test=test, body=body, orelse=orelse):
                self._if(node, test, body, orelse)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node)
            case ast.Try() | ast.TryStar():
                self._try(node)
            case ast.Match(subject=subject, cases=cases):
                self.expression(subject)
                bodies = [*(case.body for case in cases), []]
                self._branches(node, [partial(self.body, body) for body in bodies], bodies)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.expression(child)

    def _defined(self, node: Function | ast.ClassDef) -> Thing | None:
        """A class or function of the module itself; what stands inside of another has no key."""
        if not isinstance(self.story.node, ast.Module):
            return None
        known = self.scope.known
        return known.project.own(known.path, node.name)

    def _bind(self, target: ast.expr, value: ast.expr | None, annotation: ast.expr | None = None) -> None:
        match target:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self._bind(element, None)
            case ast.Starred(value=inner):
                self._bind(inner, None)
            case ast.Attribute(value=owner, attr="autocommit") if switched := self.scope.evaluate(owner):
                self.scope.set_autocommit(switched.origin, _constant(value))
            case ast.Name() | ast.Attribute():
                path = path_of(target)
                if path is None:
                    return
                thing = self.scope.evaluate(value) if value else None
                thing = thing or self.scope.annotated(annotation, path)
                self.scope.bind(path, thing, self.scope.text(value) if value else None)
                if path.startswith("self."):
                    self.attributes[path] = thing

    def _if(self, node: ast.If, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        made: dict[str, Thing] = {}

        def then() -> None:
            self.body(body)
            made.update({path: thing for path in _absent(test) if (thing := self.scope.things.get(path))})

        self.expression(test)
        self._branches(node, [then, partial(self.body, orelse)], [body, orelse])
        # What is made at its first use is there behind the branch.
        for path, thing in made.items():
            if not orelse and self.scope.things.get(path) is None:
                self.scope.bind(path, thing)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        if isinstance(node, ast.While):
            self.expression(node.test)
        else:
            self.expression(node.iter)
            self._bind(node.target, None)
            rows = self.scope.evaluate(node.iter)
            if rows and rows.role is Role.MANAGER and isinstance(node.target, ast.Name):
                self.scope.bind(node.target.id, self.scope.instance(rows.key, f"{node.lineno}:for"))
        self._branches(node, [lambda: self.body(node.body), lambda: None], [node.body, []], is_loop=True)
        self.body(node.orelse)

    def _try(self, node: ast.Try | ast.TryStar) -> None:
        def tried() -> None:
            outside = self.around
            if any(swallows(handler, self.scope) for handler in node.handlers):
                self.around = (*outside, Around(Shelter.SWALLOW, None, node))
            self.body(node.body)
            self.leave(outside)
            self.body(node.orelse)

        ways: list[Callable[[], None]] = [tried]
        ways += [partial(self._handler, handler) for handler in node.handlers]
        self._branches(node, ways, [node.body + node.orelse, *(handler.body for handler in node.handlers)])
        self.body(node.finalbody)

    def _handler(self, handler: ast.ExceptHandler) -> None:
        if handler.name:
            self.scope.bind(handler.name, None)
        self.body(handler.body)

    def _branches(
        self,
        node: ast.stmt,
        ways: list[Callable[[], None]],
        bodies: list[list[ast.stmt]],
        *,
        is_loop: bool = False,
    ) -> None:
        """Walks the arms of a branch apart; what is known behind is what those that go on agree on."""
        before, arms, ends = self.scope, self.arms, []
        for index, (way, body) in enumerate(zip(ways, bodies, strict=True)):
            self.scope = before.copy()
            self.arms = (*arms, Arm(id(node), index, ending(body), is_loop))
            way()
            if ending(body) is None:
                ends.append(self.scope)
        self.scope, self.arms = before, arms
        if ends:
            self.scope.meet(ends)

    @contextmanager
    def _entered(self, items: list[ast.withitem]) -> Iterator[None]:
        outside, commits = self.around, []
        managers: list[tuple[ast.expr, str]] = []
        for item in items:
            entered = self.enter(item.context_expr, item.optional_vars)
            if isinstance(item.context_expr, ast.Call) and (key := self._callee(item.context_expr)):
                managers.append((item.context_expr, key))
            if entered is not None and _commits_at_the_end(entered):
                commits.append((item.context_expr, entered))
        yield
        stacks = {path for item in items if item.optional_vars and (path := path_of(item.optional_vars))}
        self.leave(outside, frozenset(stacks))
        for node, thing in reversed(commits):
            self.step(Act.COMMIT, node, thing, implicit=True)
        for node, key in reversed(managers):
            self.step(Act.CALL, node, callee=key, implicit=True)


def _commits_at_the_end(thing: Thing) -> bool:
    if thing.role is Role.TRANSACTION:
        return thing.commits
    return thing.role is Role.CONNECTION and thing.library is Library.PSYCOPG and thing.autocommit is not True


def _absent(test: ast.expr) -> Iterator[str]:
    """Names that a condition finds empty: `not x`, `x is None`, `not x or x.is_closed`."""
    match test:
        case (
            ast.UnaryOp(op=ast.Not(), operand=operand)
            | ast.Compare(left=operand, ops=[ast.Is()], comparators=[ast.Constant(value=None)])
        ):
            if path := path_of(operand):
                yield path
        case ast.BoolOp(op=ast.Or(), values=[first, *_]):
            yield from _absent(first)


def _constant(value: ast.expr | None) -> bool | None:
    return bool(value.value) if isinstance(value, ast.Constant) else None
