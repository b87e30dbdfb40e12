"""What names stand for, as far as the imports of a module say."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def imports(tree: ast.Module) -> dict[str, str]:
    """Local names and the dotted names that they were imported as; `from . import x` is ``.x``."""
    found: dict[str, str] = {}
    for node in statements(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if name.asname:
                        found[name.asname] = name.name
                    else:
                        root = name.name.partition(".")[0]
                        found[root] = root
            case ast.ImportFrom(module=module, names=names, level=level):
                source = "." * level + (f"{module}." if module else "")
                found |= {name.asname or name.name: source + name.name for name in names}
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, at any depth, without the expressions in them: a tenth of the nodes."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("cases", "finalbody", "orelse", "handlers", "body"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                waiting += reversed(inner)


def is_task(decorator: ast.expr) -> bool:
    """Return whether a decorator makes a task of Celery, or of a queue like it."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (path_of(called) or "").rpartition(".")[2] in ("task", "shared_task")


def path_of(node: ast.expr) -> str | None:
    """``a.b.c`` of an expression that is nothing but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := path_of(node.value)):
        return f"{before}.{node.attr}"
    return None


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((given.value for given in call.keywords if given.arg == name), None)
