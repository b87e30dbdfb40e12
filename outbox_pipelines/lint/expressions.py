"""Reads the expressions of a function: which calls emit, write, commit, publish, or open a transaction.

Invariants:
- A call is judged by what its receiver is, never by the name of its method alone. Exceptions, each of which
  can only keep a finding back: `commit()` of something unknown, and blocks of tests that want an error.
- A connection or session that is handed on to code out of sight leaves a `USE` behind.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Final

from outbox_pipelines.lint.libraries import (
    APPLICATION,
    DJANGO_CONNECTION,
    ENTERING,
    EXECUTING,
    MANAGER_WRITES,
    PUBLISHING,
    QUEUING,
    ROW_WRITES,
    RUNNING,
    SESSION_WRITES,
    VIEW_WRITES,
    WANTING,
    Library,
    Role,
    Thing,
)
from outbox_pipelines.lint.scope import Scope, entered, is_broad
from outbox_pipelines.lint.story import Act, Arm, Around, Shelter, Step, Story
from outbox_pipelines.lint.syntax import Effect, Touch, effect, keyword, path_of, statements, touch

_ACTS: Final = {
    Effect.READ: Act.READ,
    Effect.WRITE: Act.WRITE,
    Effect.BEGIN: Act.BEGIN,
    Effect.COMMIT: Act.COMMIT,
    Effect.ROLLBACK: Act.ROLLBACK,
}

# Of constructs of SQLAlchemy, and of connections and transactions.
CONSTRUCTS: Final = {
    "insert": Effect.WRITE,
    "update": Effect.WRITE,
    "delete": Effect.WRITE,
    "select": Effect.READ,
}
CONTROLLING: Final = {
    "begin": Act.BEGIN,
    "start": Act.BEGIN,
    "commit": Act.COMMIT,
    "rollback": Act.ROLLBACK,
}


class Expressions:
    """Where a walk is: what is known, which blocks and branches are around, and the story so far."""

    def __init__(self, scope: Scope, story: Story) -> None:
        self.scope = scope
        self.story = story
        self.around: tuple[Around, ...] = ()
        self.arms: tuple[Arm, ...] = ()
        self.entering: ast.expr | None = None
        self.background: list[ast.Call] = []
        """Coroutines that run beside the function; one with a loop is a service of its own."""

    def step(
        self,
        act: Act,
        node: ast.expr | ast.stmt,
        thing: Thing | None = None,
        *,
        implicit: bool = False,
        dropped: bool = False,
        touch: Touch | None = None,
        name: str = "",
        callee: str = "",
    ) -> None:
        """Adds a step to the story."""
        self.story.steps.append(
            Step(
                len(self.story.steps),
                act,
                node,
                thing,
                self.around,
                self.arms,
                implicit,
                dropped,
                touch,
                name,
                callee,
            )
        )

    def expression(self, node: ast.AST, *, dropped: bool = False, bound: bool = False) -> None:
        """Reads an expression. Its result is `dropped`, or `bound` to a name, or used in another."""
        match node:
            case ast.Call():
                self._call(node, dropped=dropped)
            case ast.NamedExpr(target=target, value=value):
                self.expression(value, bound=True)
                self.scope.bind(target.id, self.scope.evaluate(value), self.scope.text(value))
            case ast.Name() | ast.Attribute():
                thing = self.scope.evaluate(node)
                if thing and thing.is_target and not bound:
                    self.step(Act.USE, node, thing)
            case ast.Lambda():
                pass
            case ast.Yield(value=value):
                self.story.yields_at = self.story.yields_at or node.lineno
                if value is not None:
                    self.expression(value)
                    self._lends(value)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._comprehension(node)
            case _:
                for child in ast.iter_child_nodes(node):
                    self.expression(child)

    def gives(self, value: ast.expr) -> None:
        """Notes what the function returns or yields."""
        if thing := self.scope.evaluate(value):
            self.story.returned.append(thing)

    def _lends(self, value: ast.expr) -> None:
        """Notes what the function yields; what a context manager yields is used at this point of it."""
        self.gives(value)
        thing = self.scope.evaluate(value)
        if thing is None or thing.library is Library.SQLALCHEMY:
            return
        within = (one.thing for one in self.around if one.shelter is Shelter.TRANSACTION)
        if any(one is not None and one.origin == thing.origin for one in within):
            self.story.returned[-1] = replace(thing, autocommit=None)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        before = self.scope
        self.scope = before.copy()
        for generator in node.generators:
            self.forget(generator.target)
        for child in ast.iter_child_nodes(node):
            self.expression(child)
        self.scope = before

    def forget(self, target: ast.expr) -> None:
        """The names in a target mean something unknown from here on."""
        for name in ast.walk(target):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                self.scope.bind(name.id, None)

    def enter(self, node: ast.expr, name: ast.expr | None, stack: str | None = None) -> Thing | None:
        """Enters a context manager, by `with` or an exit stack; what it is."""
        thing = self.scope.evaluate(node)
        thing = thing if thing and thing.role is not Role.FUNCTION else None
        self.entering = node
        self.expression(node, bound=True)
        self.entering = None
        shelter = self._shelter(node, thing)
        held = self._given(node) if shelter is Shelter.PERHAPS else thing
        callee = self._callee(node) if isinstance(node, ast.Call) else ""
        self.around = (*self.around, Around(shelter, held, node, stack, callee))
        if isinstance(name, ast.Name):
            self.scope.bind(name.id, entered(thing))
        elif name is not None:
            self.forget(name)
        return thing

    def leave(self, outside: tuple[Around, ...], stacks: frozenset[str] = frozenset()) -> None:
        """Leaves the blocks entered since; what an exit stack holds stays until the stack itself is left."""
        held = [one for one in self.around[len(outside) :] if one.stack and one.stack not in stacks]
        self.around = (*outside, *held)

    def _shelter(self, node: ast.expr, thing: Thing | None) -> Shelter:
        if thing and thing.role is Role.TRANSACTION:
            return Shelter.TRANSACTION
        if thing and thing.is_target:
            return Shelter.CONNECTION
        if isinstance(node, ast.Call):
            name = (path_of(node.func) or "").rpartition(".")[2]
            if name in WANTING:
                return Shelter.EXPECTED
            if name == "suppress" and any(is_broad(error, self.scope) for error in node.args):
                return Shelter.SWALLOW
        return Shelter.PERHAPS

    def _given(self, node: ast.expr) -> Thing | None:
        """The connection or session that a context manager out of sight is given."""
        arguments = node.args if isinstance(node, ast.Call) else []
        things = (self.scope.evaluate(argument) for argument in arguments)
        return next((thing for thing in things if thing and thing.is_target), None)

    def _call(self, call: ast.Call, *, dropped: bool) -> None:
        if self._is_emit(call):
            self._emit(call, dropped=dropped)
        elif (function := _run_in_thread(call)) is not None:
            for argument in [*call.args, *(given.value for given in call.keywords)]:
                if argument is not function:
                    self.expression(argument)
            self._handed(call, function)
        elif shelter := self._is_handed_over(call):
            for argument in [*call.args[1:], *(given.value for given in call.keywords)]:
                self.expression(argument)
            self._later(call, call.args[0], shelter)
        elif isinstance(call.func, ast.Attribute):
            self._method(call, call.func)
        elif (signature := self.scope.evaluate(call.func)) and signature.is_signature:
            self._arguments(call)
            self.step(Act.PUBLISH, call, signature)
        else:
            self._function(call)

    def _is_handed_over(self, call: ast.Call) -> Shelter | None:
        """Return whether a call hands a function over, to whom."""
        if not call.args:
            return None
        if self.scope.qualified(call.func) == "django.db.transaction.on_commit":
            return Shelter.COMMITTED
        # Of FastAPI and Starlette: after the response.
        is_background = isinstance(call.func, ast.Attribute) and call.func.attr == "add_task"
        return Shelter.PERHAPS if is_background else None

    def _is_emit(self, call: ast.Call) -> bool:
        package, _, name = (self.scope.qualified(call.func) or "").rpartition(".")
        return name in ("emit", "emit_many") and package.startswith("outbox_pipelines")

    def _emit(self, call: ast.Call, *, dropped: bool) -> None:
        target = call.args[0] if call.args else keyword(call, "target")
        for argument in [*call.args, *(given.value for given in call.keywords)]:
            if argument is not target:
                self.expression(argument)
        thing = self.scope.evaluate(target) if target else None
        thing = thing if thing and thing.role not in APPLICATION else None
        if not any(one.shelter is Shelter.EXPECTED for one in self.around):
            self.step(Act.EMIT, call, thing, dropped=dropped)

    def _later(self, call: ast.Call, function: ast.expr, shelter: Shelter) -> None:
        """A function that is handed over, to be called after the commit or in the background."""
        around, self.around = self.around, (*self.around, Around(shelter, None, call))
        self._handed(call, function)
        self.around = around

    def _handed(self, call: ast.Call, function: ast.expr) -> None:
        """What the call of a function does that another function is given."""
        given = self.scope.evaluate(function)
        match function:
            case _ if given and given.is_signature:
                self.step(Act.PUBLISH, call, given)
            case ast.Lambda(body=body):
                self.expression(body)
            case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[inner, *_]):
                self._handed(call, inner)
            case ast.Name() | ast.Attribute():
                found = self.scope.evaluate(function)
                owner = self.scope.evaluate(function.value) if isinstance(function, ast.Attribute) else None
                if owner and isinstance(function, ast.Attribute) and _publishes(owner, function.attr):
                    self.step(Act.PUBLISH, call, owner)
                elif found and found.role is Role.FUNCTION:
                    self.step(Act.CALL, call, callee=found.key)

    def _method(self, call: ast.Call, method: ast.Attribute) -> None:
        found, name = self.scope.evaluate(method.value), method.attr
        thing = found if found and found.role not in APPLICATION else None
        if name in ENTERING and call.args:
            self.enter(call.args[0], None, path_of(method.value))
            return
        if thing is None or isinstance(method.value, ast.Call):
            self.expression(method.value, bound=True)
        if found and _publishes(found, name):
            self._arguments(call)
            around = self.around
            if name.endswith("_on_commit"):
                self.around = (*around, Around(Shelter.COMMITTED, None, call))
            self.step(Act.PUBLISH, call, found)
            self.around = around
        elif (found and found.library is Library.DJANGO and self._django(call, found, name)) or (
            name in EXECUTING and self._executed(call, thing)
        ):
            return
        elif thing and thing.role is Role.SESSION and name in SESSION_WRITES:
            rows = [self.scope.evaluate(row) for row in _flat(call.args)]
            inserted = any(row and row.role is Role.OUTBOX_ROW for row in rows)
            self._arguments(call)
            self.step(Act.WRITE, call, thing, touch=Touch.INSERT if inserted else None)
        elif name in CONTROLLING and (thing is None or thing.is_target or thing.role is Role.TRANSACTION):
            self._arguments(call)
            if thing or name == "commit":
                self.step(CONTROLLING[name], call, thing)
        else:
            if self.scope.qualified(call.func) == "django.db.transaction.set_autocommit":
                self.step(Act.BEGIN, call, DJANGO_CONNECTION)
            if thing and name == "set_autocommit" and call.args:
                switch = call.args[0]
                value = bool(switch.value) if isinstance(switch, ast.Constant) else None
                self.scope.set_autocommit(thing.origin, value)
            callee = self._callee(call)
            if name in ("create_task", "ensure_future"):
                self.background += [one for one in call.args if isinstance(one, ast.Call)]
            if path_of(method.value) == "self" or callee:
                own = path_of(method.value) == "self"
                self.step(Act.CALL, call, name=f"self.{name}" if own else "", callee=callee)
            self._function(call, named=False)

    def _callee(self, call: ast.Call) -> str:
        """The key of the function that is called; what a `with` calls does most of it at its end."""
        found = self.scope.evaluate(call.func) if call is not self.entering else None
        if found and found.role is Role.FUNCTION and call in self.background:
            function = self.scope.known.project.function(found.key)
            if any(isinstance(one, ast.While | ast.AsyncFor) for one in statements(function or call)):
                return ""
        return found.key if found and found.role is Role.FUNCTION else ""

    def _django(self, call: ast.Call, thing: Thing, name: str) -> bool:
        """What the models, rows and views of Django do to the database."""
        is_view = self.scope.known.project.derives(thing.key, "rest_framework.") and name in VIEW_WRITES
        if thing.role is Role.MANAGER:
            writes = name in MANAGER_WRITES
        elif thing.role is Role.OBJECT and (name in ROW_WRITES or is_view):
            writes = True
        else:
            return False
        self._arguments(call)
        if thing.role is Role.MANAGER or writes:
            self.step(Act.WRITE if writes else Act.READ, call, DJANGO_CONNECTION)
        if callee := self._callee(call):
            self.step(Act.CALL, call, callee=callee)
        return True

    def _function(self, call: ast.Call, *, named: bool = True) -> None:
        if named and isinstance(call.func, ast.Name):
            self.step(Act.CALL, call, name=call.func.id, callee=self._callee(call))
        if not self._construct(call):
            self._arguments(call)

    def _arguments(self, call: ast.Call) -> None:
        # A session made of a connection is that connection under another name, not a use out of sight.
        bound = self.scope.evaluate(call) is not None
        for argument in [*call.args, *(given.value for given in call.keywords)]:
            self.expression(argument, bound=bound)

    def _executed(self, call: ast.Call, thing: Thing | None) -> bool:
        """A statement that is executed, if its text is known or its receiver is."""
        text = next((text for one in call.args if (text := self.scope.text(one)) is not None), None)
        if text is not None:
            touched = touch(text)
            if thing or touched:
                self.step(_ACTS[effect(text)], call, thing, touch=touched)
                return True
        elif thing and thing.is_target:
            found = self._effect_of(call.args[0]) if call.args else None
            self._arguments(call)
            self.step(_ACTS[found] if found else Act.USE, call, thing)
            return True
        return False

    def _effect_of(self, node: ast.expr) -> Effect | None:
        """What a statement built by SQLAlchemy does: `update(orders).where(…)` begins with its verb."""
        while isinstance(node, ast.Call):
            name = (self.scope.qualified(node.func) or "").split(".")
            if name[0] in ("sqlalchemy", "sqlmodel") and name[-1] in CONSTRUCTS:
                return CONSTRUCTS[name[-1]]
            if not isinstance(node.func, ast.Attribute):
                return None
            node = node.func.value
        return None

    def _construct(self, call: ast.Call) -> bool:
        """`insert(OutboxEvent)`, and the like, of SQLAlchemy."""
        name = (self.scope.qualified(call.func) or "").split(".")
        if name[0] != "sqlalchemy" or not call.args:
            return False
        if name[-1] == "insert" and self.scope.is_model(call.args[0]):
            self.step(Act.WRITE, call, touch=Touch.INSERT)
            return True
        if name[-1] in ("update", "delete") and self.scope.is_outbox(call.args[0]):
            self.step(Act.WRITE, call, touch=Touch.CHANGE)
            return True
        return False


def _run_in_thread(call: ast.Call) -> ast.expr | None:
    """The function that a call runs in a thread and waits for."""
    name, owner = path_of(call.func) or "", ""
    if isinstance(call.func, ast.Attribute):
        name, owner = call.func.attr, (path_of(call.func.value) or "").rpartition(".")[2]
    place = RUNNING.get(f"{owner}.{name}", RUNNING.get(name))
    return call.args[place] if place is not None and len(call.args) > place else None


def _publishes(thing: Thing, name: str) -> bool:
    if thing.library is Library.CELERY:
        return name in QUEUING
    return thing.role is Role.PRODUCER and name in PUBLISHING


def _flat(arguments: list[ast.expr]) -> list[ast.expr]:
    """The arguments, and those in lists among them."""
    flat: list[ast.expr] = []
    for argument in arguments:
        flat += argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument]
    return flat
