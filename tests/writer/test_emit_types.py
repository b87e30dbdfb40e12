"""The types of `emit`, as mypy sees them in an application."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RIGHT = """
from uuid import UUID
from typing import Any
import psycopg
import sqlalchemy
from psycopg.rows import DictRow
from sqlalchemy import orm
from outbox_pipelines.writer import Emitted, emit

def write(
    connection: psycopg.Connection,
    dicts: psycopg.Connection[DictRow],
    cursor: psycopg.Cursor[tuple[Any, ...]],
    raw: psycopg.RawCursor[DictRow],
    core: sqlalchemy.Connection,
    session: orm.Session,
    scoped: orm.scoped_session[orm.Session],
) -> UUID:
    emit(connection, "order", 1, "e", {"a": [1]})
    emit(dicts, "order", UUID(int=1), "e", None, headers={"h": 1})
    emit(cursor, "order", "1", "e", [], idempotency_key="k", version=1)
    emit(raw, "order", "1", "e", [])
    emit(core, "order", "1", "e", 5, correlation_id="c", causation_id="a", traceparent="t")
    emit(session, "order", "1", "e", "text")
    emitted: Emitted = emit(scoped, "order", "1", "e", {})
    seq: int | None = emitted.seq
    duplicate: bool = emitted.duplicate
    return emitted.id
"""
HEAD = """
import sqlite3
import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession
from outbox_pipelines.writer import emit

def write(
    asynchronous: psycopg.AsyncConnection, engine: sqlalchemy.Engine, session: AsyncSession,
    other: sqlite3.Connection, connection: psycopg.Connection,
) -> None:
"""
WRONG = {
    'emit(asynchronous, "order", 1, "e", {})': "arg-type",
    'emit(engine, "order", 1, "e", {})': "arg-type",
    'emit(session, "order", 1, "e", {})': "arg-type",
    'emit(other, "order", 1, "e", {})': "arg-type",
    'emit(None, "order", 1, "e", {})': "arg-type",
    'emit(connection, 5, 1, "e", {})': "arg-type",
    'emit(connection, "order", 1, "e")': "call-arg",
    'emit(connection, "order", 1, "e", {}, {"h": 1})': "call-arg",
    'emit(connection, "order", 1, "e", {}, headers=["h"])': "arg-type",
    'emit(connection, "order", 1, "e", {}, key="k")': "call-arg",
}

FILES = ["right.py", "wrong.py"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[str]:
    """What mypy --strict prints about both files."""
    here = tmp_path_factory.mktemp("types")
    (here / "right.py").write_text(RIGHT)
    (here / "wrong.py").write_text(HEAD + "".join(f"    {call}\n" for call in WRONG))
    cache = request.config.rootpath / ".mypy_cache" / "tests"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", *FILES],
        cwd=here,
        env=os.environ | {"MYPYPATH": str(request.config.rootpath)},
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_every_target_is_accepted(printed: list[str]) -> None:
    """An annotation that makes an application cast what works."""
    assert [line for line in printed if not line.startswith(("wrong.py:", "Found "))] == []


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_found(printed: list[str], call: str) -> None:
    """`Any` as the type of the target: AsyncSession would be found out in production."""
    line = len(HEAD.splitlines()) + 1 + list(WRONG).index(call)
    [error] = [each for each in printed if each.startswith(f"wrong.py:{line}: error:")]
    assert f"[{WRONG[call]}]" in error


def test_the_wrong_file_has_no_other_mistakes(printed: list[str]) -> None:
    """Errors that come from somewhere else, an import say."""
    errors = [line for line in printed if ": error:" in line]
    assert len(errors) == len(WRONG), errors
