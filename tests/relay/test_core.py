"""The core of the relay decides, and does nothing else."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from outbox_pipelines.existing import core as marked_table_core
from outbox_pipelines.relay import core

PURE = {"__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "json", "math", "typing"}
OURS = (
    "outbox_pipelines.relay.core.",
    "outbox_pipelines.existing.core.",
    "outbox_pipelines.core.event",
    "outbox_pipelines.errors",
    "outbox_pipelines.core.position",
    "outbox_pipelines.core.sequence",
)


@pytest.mark.parametrize("part", [core, marked_table_core])
def test_it_has_no_io_no_thread_no_clock_and_no_chance(part: ModuleType) -> None:
    """Guards against a decision that the model cannot explore, since something else takes part in it."""
    files = list(Path(part.__path__[0]).glob("*.py"))
    assert len(files) > 3
    for file in files:
        for name in _imports(file):
            assert name.split(".")[0] in PURE or name.startswith(OURS), f"{file.name} imports {name}"


def _imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found
