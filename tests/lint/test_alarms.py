"""Code that has nothing to do with any rule: nothing is found in it, soon."""

from __future__ import annotations

import asyncio
import email
import time
from pathlib import Path

import pytest
from sqlalchemy import orm

from outbox_pipelines.lint.linter import Options, check, check_sources, python_files

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.extended
def test_our_own_code() -> None:
    """Guards against false alarms about our own code, and against true ones."""
    assert check(python_files([ROOT / "outbox_pipelines", ROOT / "tests" / "demo"])) == []


@pytest.mark.parametrize("package", [asyncio, email, orm], ids=lambda package: package.__name__)
def test_libraries(package: object) -> None:
    """Guards against crashes on unexpected Python, alarms about any `send` or `execute`, slow linting."""
    paths = python_files([Path(package.__file__).parent])  # type: ignore[attr-defined]
    started = time.process_time()
    # All of it, not only what speaks of an outbox.
    sources = {str(path): path.read_bytes() for path in paths}
    assert check_sources(sources, Options(strict_inserts=True)) == []
    assert time.process_time() - started < 10


def test_many_constants_and_branches() -> None:
    """Guards against work that doubles with each class, name or branch."""
    classes = "".join(f"class C{n}:\n    A = 'outbox'\n    B = A\n" for n in range(60))
    body = "".join(f"    t = t + t\n    if x:\n        y{n} = 'a'\n" for n in range(60))
    started = time.process_time()
    assert check_sources({"a.py": f"{classes}def f(x):\n    t = 'a'\n{body}".encode()}) == []
    assert time.process_time() - started < 5
