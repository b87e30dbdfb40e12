"""Runs mutants against the tests that send their statements: a pytest plugin with a loop of its own.

Invariants:
- Tests are collected, and servers started, once. Each mutant has a process of its own that is forked from
  there, so that a mutant that hangs or breaks its process is over with it.
- The first test that fails kills a mutant; so does a test that takes longer than its time.
- A mutant without any test that sends its statement is reported as one without a test.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants import patch
from tests.mutants.catalog import FINDERS, Mutant
from tests.mutants.record import normal

# How many times longer than it was recorded to take a run of tests may be.
_SLOWER: Final = 6
_LEAST_SECONDS: Final = 40.0
_SHORTEST_PIECE: Final = 14
_IMPORT: Final = "the import"


@dataclass(frozen=True)
class Result:
    """What became of a mutant: killed, survived or untested; by which test, after how many tests."""

    outcome: str
    by: str
    tests: int
    seconds: float
    shown: str


class Covering:
    """Which tests send which statement, as `record` has noted it.

    Args:
        budget: seconds that the tests of one mutant may take together, as they were recorded.
    """

    def __init__(self, files: Sequence[Path], budget: float) -> None:
        self._budget = budget
        self._tests: dict[str, float] = {}
        self._of: dict[str, set[str]] = {}
        for file in files:
            given = json.loads(file.read_text())
            for name, found in given["tests"].items():
                self._tests[name] = found["seconds"]
                for number in found["queries"]:
                    self._of.setdefault(given["texts"][number], set()).add(name)
        self._kills: Counter[tuple[str, str, str]] = Counter()

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that may find a mutant, the likeliest and fastest first, within the budget."""
        names = self._sending(mutant)
        for start, finders in FINDERS.items():
            if mutant.file.startswith(start) and not mutant.around:
                names = {name for name in self._tests if any(finder in name for finder in finders)}
        found: list[str] = []
        left = self._budget
        place = (mutant.file, mutant.name)
        # First what has found mutants of this constant, then what is named after it.
        words = {word.lower() for word in mutant.name.strip("_").split("_") if len(word) > 3}

        def rank(name: str) -> tuple[int, int, float]:
            named = sum(word in name for word in words)
            return -self._kills[*place, name], -named, self._tests[name]

        for name in sorted(names, key=rank):
            if found and self._tests[name] > left:
                break
            found.append(name)
            left -= self._tests[name]
        return found

    def _sending(self, mutant: Mutant) -> set[str]:
        for piece in mutant.around:
            wanted = normal(piece).strip()
            if len(wanted) < _SHORTEST_PIECE and not mutant.file.endswith(".sql"):
                continue
            if found := {name for text, names in self._of.items() if wanted in text for name in names}:
                return found
        return set()

    def killed(self, mutant: Mutant, test: str) -> None:
        """Let this test come first for further mutants of the same constant."""
        self._kills[mutant.file, mutant.name, test] += 1

    def seconds(self, names: Sequence[str]) -> float:
        """Return how long these tests took when they were recorded."""
        return sum(self._tests[name] for name in names)

    def quickest(self) -> list[str]:
        """Return all tests, the quickest first."""
        return sorted(self._tests, key=self._tests.__getitem__)


class Runner:
    """Runs these mutants in place of the collected tests.

    Args:
        report: receives each result.
        seconds: begin no further mutant after so long.
    """

    def __init__(
        self,
        mutants: Sequence[Mutant],
        covering: Covering,
        report: Callable[[Mutant, Result], None],
        seconds: float,
    ) -> None:
        self._mutants = mutants
        self._covering = covering
        self._report = report
        self._end = time.monotonic() + seconds
        self._fit: set[str] = set()
        self._unfit: set[str] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._warm(items)
        for mutant in self._mutants:
            if time.monotonic() > self._end:
                break
            names = [name for name in self._covering.of(mutant) if name in items]
            if not names:
                self._report(mutant, Result("untested", "", 0, 0.0, str(mutant)))
                continue
            began = time.monotonic()
            by, tests = self._find(mutant, [items[name] for name in names if name not in self._unfit])
            if by:
                self._covering.killed(mutant, by)
            outcome = "killed" if by else "survived"
            self._report(mutant, Result(outcome, by, tests, round(time.monotonic() - began, 1), str(mutant)))
        # Before files are removed at the session's end.
        session._setupstate.teardown_exact(None)
        return True

    def _find(self, mutant: Mutant, items: list[pytest.Item]) -> tuple[str, int]:
        """Return the test that found the mutant, or "", and how many ran."""
        by, tests = self._try(mutant, items)
        if by not in ("", _IMPORT) and by not in self._fit:
            # It may fail here without any mutant.
            failed, _ = self._try(None, [item for item in items if item.nodeid == by])
            if failed:
                self._unfit.add(by)
                return self._find(mutant, [item for item in items if item.nodeid != by])
            self._fit.add(by)
        return by, tests

    def _warm(self, items: dict[str, pytest.Item]) -> None:
        """Run a test for each kind of server, which then stays."""
        wanted = {"stack", "server"}
        for name in self._covering.quickest():
            item = items.get(name)
            if item is not None and wanted & set(getattr(item, "fixturenames", ())):
                wanted -= set(getattr(item, "fixturenames", ()))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=_elsewhere(item))

    def _try(self, mutant: Mutant | None, items: list[pytest.Item]) -> tuple[str, int]:
        """Run tests in a process of their own; return the one that failed, or "", and how many ran."""
        if not items:
            return "", 0
        seconds = self._covering.seconds([item.nodeid for item in items])
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                _run(mutant, items, writer)
            finally:
                os._exit(0)
        os.close(writer)
        told, deadline = b"", time.monotonic() + max(_LEAST_SECONDS, _SLOWER * seconds)
        while (left := deadline - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
            more = os.read(reader, 65536)
            if not more:
                break
            told += more
        os.close(reader)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = told.decode().splitlines()
        if lines and lines[-1] == "all passed":
            return "", len(lines) - 1
        # It failed, its process ended, or it took too long.
        return (lines[-1] if lines else items[0].nodeid), len(lines)


def _run(mutant: Mutant | None, items: list[pytest.Item], writer: int) -> None:
    """In the process of one mutant: name each test before it begins, and end with the first that fails."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    from tests import forks

    # The process that starts others has the mutant as well.
    forks._Forker._one = None
    if mutant is not None:
        os.environ[patch.VARIABLE] = json.dumps([mutant.file, mutant.source()])
        os.write(writer, f"{_IMPORT}\n".encode())
        patch.apply(mutant.file, mutant.source())
    failed: list[bool] = []

    class Watching:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(True)

    items[0].config.pluginmanager.register(Watching())
    if mutant is not None and mutant.file.endswith(".sql"):
        _forget_templates(items[0])
    for item, following in zip(items, [*items[1:], _elsewhere(items[-1])], strict=True):
        os.write(writer, f"{item.nodeid}\n".encode())
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed:
            return
    os.write(writer, b"all passed\n")


def _elsewhere(item: pytest.Item) -> pytest.Item:
    """Return a test of another file: before it, everything ends that does not last for the session."""
    return next(other for other in item.session.items if other.path != item.path)


def _forget_templates(item: pytest.Item) -> None:
    """Let databases be migrated again, by the mutated files; the servers stay."""
    from tests import conftest

    once = conftest.Lasting.once
    kinds = ("migrated", "template")

    def renewed(self: Any, name: Any, make: Any) -> Any:
        is_template = isinstance(name, tuple) and name[0] in kinds
        return once(self, (*name, "mutant") if is_template else name, make)

    conftest.Lasting.once = renewed  # type: ignore[method-assign]
