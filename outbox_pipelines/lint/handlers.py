"""Find exception handlers that swallow an error of `emit`: they catch it and only log it or do nothing."""

from __future__ import annotations

import ast
from typing import Final

from outbox_pipelines.lint.names import path_of
from outbox_pipelines.lint.scope import Scope

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
