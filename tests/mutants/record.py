"""Which statements each test sends: a pytest plugin that writes them to build/mutants.

Invariants:
- A statement is noted as text, before its parameters are filled in. Numbers in it are left out, so that names
  that a test draws do not make another statement of it.
- What a test's processes send is not noted; nor are statements in DuckDB.
- A test that fails or is skipped covers nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

_DRAWN: Final = re.compile(r"[0-9a-f]*\d[0-9a-f]{3,}")
_MOST_CHARACTERS: Final = 30_000


# What starts servers of its own, or repeats itself.
_OWN_SERVERS: Final = {"own_servers", "killable", "strict", "servers", "is_thorough"}


def normal(text: str) -> str:
    """Return a statement without the names that a test draws."""
    return _DRAWN.sub("0", text)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are too slow for mutants, or do not run in this process."""
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    return bool(
        item.get_closest_marker("thorough")
        or item.get_closest_marker("slow")
        or _OWN_SERVERS.intersection(getattr(item, "fixturenames", ()))
        # The same on another version of PostgreSQL.
        or "machine" in item.nodeid.rpartition("[")[2]
    )


class Recorder:
    """Notes the statements of each test that passes, and the seconds that it takes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._texts: dict[str, int] = {}
        self._tests: dict[str, dict[str, Any]] = {}
        self._now: set[int] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        leave_out(config, items)

    def _note(self, query: object, context: Any) -> None:
        if isinstance(query, psycopg.sql.Composable):
            query = query.as_string(context)
        text = query.decode("utf-8", "replace") if isinstance(query, bytes) else str(query)
        if len(text) <= _MOST_CHARACTERS:
            self._now.add(self._texts.setdefault(normal(text), len(self._texts)))

    def watch(self) -> None:
        """From here on, note what this process sends."""
        from outbox_pipelines.consumer.messages import FirstStatement

        for kind in (psycopg.Cursor, psycopg.AsyncCursor):
            for name in ("execute", "executemany", "stream", "copy"):
                self._wrap(kind, name)
        self._wrap(FirstStatement, "message")

    def _wrap(self, kind: Any, name: str) -> None:
        given = getattr(kind, name)

        def noting(its: Any, query: object, *more: Any, **named: Any) -> Any:
            self._note(query, getattr(its, "connection", None))
            return given(its, query, *more, **named)

        setattr(kind, name, noting)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._now = set()
        self._seconds, self._passed = 0.0, False
        try:
            return (yield)
        finally:
            if self._passed:
                found = {"seconds": round(self._seconds, 2), "queries": sorted(self._now)}
                self._tests[item.nodeid] = found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._passed = report.passed
        # What lasts for the session is made once.
        if report.when == "call" or report.duration < 1.5:
            self._seconds += report.duration

    def pytest_runtest_logfinish(self) -> None:
        # Often: a run that is interrupted keeps what it has found.
        if len(self._tests) % 20 == 0:
            self.save()

    def pytest_sessionfinish(self) -> None:
        self.save()

    def save(self) -> None:
        """Write what was noted so far."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        given = {"texts": list(self._texts), "tests": self._tests}
        self._file.write_text(json.dumps(given))
