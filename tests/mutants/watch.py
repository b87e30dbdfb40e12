"""Notes the statements that a process sends.

Invariants:
- A statement is noted as text, before its parameters are filled in. Numbers in it are left out, so that names
  that a test draws do not make another statement of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, Final

import psycopg

# The file in which the processes that tests start note what they send.
VARIABLE: Final = "TESTS_STATEMENTS"
_DRAWN: Final = re.compile(r"[0-9a-f]*\d[0-9a-f]{3,}")
_MOST_CHARACTERS: Final = 30_000


def normal(text: str) -> str:
    """Return a statement without the names that a test draws."""
    return _DRAWN.sub("0", text)


def watch(note: Callable[[str], object]) -> None:
    """From here on, let `note` know what this process sends."""
    from outbox_pipelines.consumer.psycopg_transactions import FirstStatement

    for kind in (psycopg.Cursor, psycopg.AsyncCursor):
        for name in ("execute", "executemany", "stream", "copy"):
            _wrap(kind, name, note)
    _wrap(FirstStatement, "message", note)


def _wrap(kind: Any, name: str, note: Callable[[str], object]) -> None:
    given = getattr(kind, name)

    def noting(its: Any, query: object, *more: Any, **named: Any) -> Any:
        text = query
        if isinstance(text, psycopg.sql.Composable):
            text = text.as_string(getattr(its, "connection", None))
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
        if len(text) <= _MOST_CHARACTERS:
            note(normal(text))
        return given(its, query, *more, **named)

    setattr(kind, name, noting)


def watch_into(file: str) -> None:
    """From here on, add what this process and its children send to a file."""
    seen: set[str] = set()
    # Of each a line, written at once: the process may be killed.
    number = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(text: str) -> None:
        if text not in seen:
            seen.add(text)
            os.write(number, json.dumps(text).encode() + b"\n")

    watch(note)
