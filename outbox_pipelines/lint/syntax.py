"""What names stand for, as far as the imports of a module say; what an SQL statement does, as far as it says.

Invariants:
- A table is the outbox by its whole name, with or without schema and quotes: `outbox_archive` is another.
- Parts of a text that are not known stand as ``{}``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Final


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


class Effect(Enum):
    """What a statement does to the database."""

    READ = auto()
    WRITE = auto()
    BEGIN = auto()
    COMMIT = auto()
    ROLLBACK = auto()


class Touch(Enum):
    """What a statement does to the outbox's rows."""

    INSERT = auto()
    CHANGE = auto()
    CLAIM = auto()
    """Reads rows to publish them, of this table or one that is named like it, or of any queue."""


_OUTBOX = r"""(?:[\w{}"]+\s*\.\s*)?"?outbox"?(?![\w."])"""
_INSERT = re.compile(rf"\binsert\s+into\s+{_OUTBOX}|\bcopy\s+{_OUTBOX}[^;]*\bfrom\b", re.IGNORECASE)
_CHANGE = re.compile(
    rf"\bupdate\s+(?:only\s+)?{_OUTBOX}(?:\s+(?:as\s+)?\w+)?\s+set\b"
    rf"|\bdelete\s+from\s+(?:only\s+)?{_OUTBOX}"
    rf"|\btruncate\s+(?:table\s+)?(?:only\s+)?{_OUTBOX}",
    re.IGNORECASE,
)
_WRITE = re.compile(
    r"\b(?:insert\s+into|update\s+\S+|delete\s+from|merge\s+into|truncate|copy)\b", re.IGNORECASE
)
_CLAIM = re.compile(r"""\bfrom\s+[\w{}".]*outbox|\bskip\s+locked\b""", re.IGNORECASE)
_LEADING_COMMENT = re.compile(r"^(?:\s|--[^\n]*\n|/\*.*?\*/)+", re.DOTALL)
_CONTROL: Final = {
    "begin": Effect.BEGIN,
    "start": Effect.BEGIN,
    "commit": Effect.COMMIT,
    "end": Effect.COMMIT,
    "rollback": Effect.ROLLBACK,
}
# Functions that only wrap a text; `sql.SQL("…").format(…)` and `"…".format(…)` are seen through too.
_WRAPPERS: Final = {"text", "SQL", "dedent", "cleandoc"}


def effect(text: str) -> Effect:
    """What the statement does; a SELECT that locks is a read."""
    statement = _LEADING_COMMENT.sub("", text)
    first = re.match(r"\w*", statement)
    word = first.group().lower() if first else ""
    if word in _CONTROL:
        return _CONTROL[word]
    if word == "select":
        return Effect.READ
    return Effect.WRITE if _WRITE.search(statement) else Effect.READ


def touch(text: str) -> Touch | None:
    """What the statement does to the outbox; None if it leaves its rows alone."""
    if _CHANGE.search(text):
        return Touch.CHANGE
    if _INSERT.search(text):
        return Touch.INSERT
    return Touch.CLAIM if _CLAIM.search(text) else None


def text_of(node: ast.expr, texts: Mapping[str, str]) -> str | None:
    """The text of an expression, from literals and the names whose texts are known."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_part(part, texts) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            before, after = text_of(left, texts), text_of(right, texts)
            return None if before is None and after is None else (before or "{}") + (after or "{}")
        case ast.BinOp(left=left, op=ast.Mod()):
            return text_of(left, texts)
        case ast.Call(func=ast.Attribute(value=inner, attr="format" | "strip" | "encode")):
            return text_of(inner, texts)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[inner, *_]) if (
            name in _WRAPPERS
        ):
            return text_of(inner, texts)
        case ast.Name() | ast.Attribute():
            return texts.get(path_of(node) or "")
    return None


def _part(node: ast.expr, texts: Mapping[str, str]) -> str:
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    return text_of(inner, texts) or "{}"
