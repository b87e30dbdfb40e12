"""Which exception handlers let an error of `emit` vanish: they catch it and do nothing, or write a log."""

from __future__ import annotations

import ast
from typing import Final

from outbox_pipelines.lint.names import path_of
from outbox_pipelines.lint.scope import Scope

# Whatever else is caught is somebody's decision about that one error.
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
    """Whether the handler catches any error and leaves no trace of it but a log."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(is_broad(error, scope) for error in caught) and all(map(_only_tells, handler.body))


def is_broad(error: ast.expr | None, scope: Scope) -> bool:
    """Whether errors of `emit` are of this class, whatever their cause; None is the bare `except:`."""
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
