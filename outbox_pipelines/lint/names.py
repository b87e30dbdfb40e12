"""What names stand for, as far as the imports of a module say."""

from __future__ import annotations

import ast


def imports(tree: ast.Module) -> dict[str, str]:
    """Local names and the dotted names that they were imported as; `from . import x` is ``.x``."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
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
