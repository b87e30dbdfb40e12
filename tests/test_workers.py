"""What the processes of a run do not share, although they are forked from one that has imported all."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import wait_until

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


def _run_of(text: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a run with one process, of a file with this text."""
    (folder / "test_it.py").write_text(text)
    options = ["-n", "1", "-p", "tests.conftest", "-c", "pyproject.toml", str(folder / "test_it.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return [sys.executable, "-m", "pytest", *options], environment


_HANGS = """
import pathlib, time, pytest
here = pathlib.Path(__file__).parent

@pytest.fixture
def server():
    yield
    (here / "ended").touch()

def test_it(server):
    (here / "begun").touch()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_that_is_ended_ends_what_its_tests_have_started(tmp_path: Path) -> None:
    """Guards against installations that go on for hours after a run was ended by hand."""
    command, environment = _run_of(_HANGS, tmp_path)
    with subprocess.Popen(command, cwd=_TESTS.parent, env=environment, stdout=subprocess.DEVNULL) as run:
        try:
            wait_until((tmp_path / "begun").exists, what="a test that hangs")
        finally:
            run.terminate()
    wait_until((tmp_path / "ended").exists, what="the end of what it has started")


_CRASHES = """
import ctypes, resource

def test_it():
    # A core file would be left.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reads_nothing()

def reads_nothing():
    ctypes.string_at(0)
"""


@pytest.mark.slow
@pytest.mark.extended
def test_of_a_crash_signal_and_stack_are_reported(tmp_path: Path) -> None:
    """Guards against a crash of a native library in one run of a hundred that leaves no trace."""
    command, environment = _run_of(_CRASHES, tmp_path)
    run = subprocess.run(command, cwd=_TESTS.parent, env=environment, capture_output=True, text=True)
    assert "exit code -11" in run.stdout
    assert "in reads_nothing" in run.stdout
