"""Which statements each test sends: a pytest plugin that writes them to build/mutants.

Invariants:
- What a test's processes send is noted as well, by themselves, in a file. Statements in DuckDB are not.
- A test that fails or is skipped covers nothing.
- What is recorded stays: another run adds the tests that are missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants import watch

# What starts servers of its own, or repeats itself.
_OWN_SERVERS: Final = {"own_servers", "killable", "strict", "servers", "is_thorough"}


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are too slow for mutants, or do not run in this process."""
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    return bool(
        item.get_closest_marker("thorough")
        or _OWN_SERVERS.intersection(getattr(item, "fixturenames", ()))
        # The same on another version of PostgreSQL.
        or "machine" in item.nodeid.rpartition("[")[2]
    )


class Recorder:
    """Notes the statements of each test that passes, and the seconds that it takes.

    Args:
        seconds: begin no further test after so long.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._end = time.monotonic() + seconds
        given = json.loads(file.read_text()) if file.exists() else {"texts": [], "tests": {}}
        self._texts: dict[str, int] = {text: number for number, text in enumerate(given["texts"])}
        self._tests: dict[str, dict[str, Any]] = given["tests"]
        self._now: set[int] = set()
        self._sent = file.with_suffix(".sent")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        leave_out(config, items)
        items[:] = [item for item in items if item.nodeid not in self._tests]

    def watch(self) -> None:
        """From here on, note what this process and those that it starts send."""
        os.environ[watch.VARIABLE] = str(self._sent)
        watch.watch(self._note)

    def _note(self, text: str) -> None:
        self._now.add(self._texts.setdefault(text, len(self._texts)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if time.monotonic() > self._end:
            item.session.shouldstop = "the seconds are over"
        self._now = set()
        self._sent.parent.mkdir(parents=True, exist_ok=True)
        self._sent.write_text("")
        self._seconds, self._passed = 0.0, False
        try:
            return (yield)
        finally:
            for line in self._sent.read_text().splitlines():
                self._note(json.loads(line))
            found = {"seconds": round(self._seconds, 2), "queries": sorted(self._now)}
            self._tests[item.nodeid] = found if self._passed else {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._passed = report.passed
        # What lasts for the session is made once.
        if report.when == "call" or report.duration < 1.5:
            self._seconds += report.duration

    def pytest_runtest_logfinish(self) -> None:
        # Often: a run that is interrupted keeps what it has found.
        if len(self._tests) % 5 == 0:
            self.save()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.save(is_complete=not session.shouldstop)

    def save(self, *, is_complete: bool = False) -> None:
        """Write what was noted so far."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        given = {"is_complete": is_complete, "texts": list(self._texts), "tests": self._tests}
        self._file.write_text(json.dumps(given))
