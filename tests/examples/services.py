"""The examples as processes on the loopback address, and what they have written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest

from tests import forks
from tests.schema.servers import Database

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def environment(database: Database, **more: str) -> dict[str, str]:
    """What `outbox local run` gives to an example, in which this checkout is installed."""
    # Go's driver takes the file of the password from PGPASSFILE, and does not know it in a DSN.
    at: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(database.dsn)
    file = str(at.pop("passfile"))
    dsn = psycopg.conninfo.make_conninfo(**at)
    given = {"OUTBOX_DSN": dsn, "PGPASSFILE": file}
    return os.environ | given | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


@contextmanager
def serving(
    command: Sequence[str | Path], database: Database, directory: Path = EXAMPLES, **more: str
) -> Iterator[httpx.Client]:
    """A client of a service that says on its output where it listens."""
    process: forks.Popen[str] = forks.Popen(
        command,
        cwd=directory,
        env=environment(database, **more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError(f"it ended: {''.join(said)}")
        # uvicorn closes a connection shortly after an answer 500, and after 5 s without a request. A request
        # that is sent at that time fails.
        no_reuse = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=found.group(), timeout=30, limits=no_reuse) as client:
            yield client
    finally:
        process.kill()
        process.communicate()


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def go_program_of(example: str, directory: Path) -> Path:
    """Build an example in Go; skip the test if this machine has no Go, which CI must have."""
    if shutil.which("go") is None:
        message = "this machine has no Go: apt-get install golang-go"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    program = directory / example
    subprocess.run(
        ["go", "build", "-o", program, "."],
        cwd=EXAMPLES / example,
        # Without cgo no C compiler is needed.
        env=os.environ | {"CGO_ENABLED": "0"},
        check=True,
    )
    return program


class Event(NamedTuple):
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: object
    correlation_id: str | None


def events(database: Database) -> list[Event]:
    """What is in the outbox, by seq."""
    rows = database.rows(f"SELECT {', '.join(Event._fields)} FROM outbox ORDER BY seq")
    return [Event(*row) for row in rows]
