"""What the processes of a run do not share, although they are forked from one that has imported all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TESTS: Final = Path(__file__).parent
_DRAWS: Final = re.compile(r"\b(uuid[147]|token_\w+|urandom|getpid)\(")


def _at_import(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that an import of the module makes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(child)


def test_a_module_of_tests_draws_nothing_when_it_is_imported() -> None:
    """Guards against processes that remove each other's topics, since they have the same prefix."""
    texts = {path: path.read_text() for path in _TESTS.rglob("*.py")}
    drawn = [
        f"{path.relative_to(_TESTS)}:{call.lineno}"
        for path, text in texts.items()
        if _DRAWS.search(text)
        for call in _at_import(ast.parse(text))
        if _DRAWS.match(f"{ast.unparse(call.func).rpartition('.')[2]}(")
    ]
    assert drawn == []
