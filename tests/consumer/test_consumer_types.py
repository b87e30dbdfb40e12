"""The types of the consumer, as mypy sees them in an application."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RIGHT = """
from dataclasses import dataclass
import psycopg
from sqlalchemy.ext.asyncio import AsyncSession
from outbox_pipelines.consumer import AsyncConsumer, Consumer, Event
from outbox_pipelines.consumer.testing import Verdict, handle, handle_async, make_event

@dataclass
class Placed:
    total: int

consumer = Consumer(source="s", topics=["t"], kafka={}, dsn="")
asynchronous = AsyncConsumer(source="s", topics=["t"], kafka={}, dsn="")

@consumer.on("a")
def plain(event: Event, connection: psycopg.Connection) -> None:
    print(event.payload["total"])

@consumer.on("b")
def typed(order: Placed, connection: psycopg.Connection) -> None: ...

@consumer.on("c")
def both(event: Event[Placed], connection: psycopg.Connection) -> None:
    total: int = event.payload.total
    wider: Event[object] = event

@consumer.on("d", batch=10)
def many(events: list[Event[Placed]], connection: psycopg.Connection) -> None: ...

@asynchronous.on("b")
async def waits(order: Placed, session: AsyncSession) -> None: ...

def test(connection: psycopg.Connection) -> list[Verdict]:
    return handle(consumer, make_event("a", {"total": 1}), using=connection)

async def test_async(session: AsyncSession) -> None:
    assert await handle_async(asynchronous, make_event("b"), using=session) == ["handled"]
"""
WRONG = """
def f(event: Event[Placed]) -> None:
    event.payload.totla
    handle(asynchronous, make_event("a"), using=None)
    handle(consumer, {"total": 1}, using=None)
    make_event("a", totla=1)
"""


def test_handlers_and_their_tests_are_accepted_and_mistakes_are_found(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Guards against `Event` that wants a parameter in strict mode, and a typed payload that is Any."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(f"from right import *\n{WRONG}")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nimplicit_reexport = true\n")
    cache = request.config.rootpath / ".mypy_cache" / "tests"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={cache}", "right.py", "wrong.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(request.config.rootpath)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("right.py:")] == []
    errors = [
        line.rpartition(" ")[2] for line in lines if line.startswith("wrong.py:") and ": error:" in line
    ]
    assert errors == ["[attr-defined]", "[arg-type]", "[arg-type]", "[call-arg]"], done.stdout + done.stderr
