"""Runs mutants against the tests that send their statements: a pytest plugin with a loop of its own.

Invariants:
- Tests are collected, modules imported and servers started once. Each mutant has a process of its own that is
  forked from there, so that a mutant that hangs or breaks its process is over with it.
- The first test that fails kills a mutant; so does a test that takes longer than its time. The same test must
  pass without the mutant: the first time that it kills one, and each time that it took too long.
- A test that a worker stops removes what it has made: the servers would fill with databases otherwise.
- A mutant without any test that sends its statement is reported as one without a test.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants import patch
from tests.mutants.catalog import FINDERS, Mutant
from tests.mutants.watch import normal

# A test may take so many times as long as when it was recorded, and so many seconds at least.
_SLOWER: Final = 5
_LEAST_SECONDS: Final = 6.0
# What a test that is out of time may take to remove what it has made.
_TEARDOWN_SECONDS: Final = 15.0
_SHORTEST_PIECE: Final = 14
_IMPORT: Final = "the import"
_PASSED: Final = "all passed"
_LATE: Final = "out of time"


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

    def __init__(self, file: Path, budget: float) -> None:
        self._budget = budget
        self._seconds: dict[str, float] = {}
        self._sends: dict[str, int] = {}
        self._of: dict[str, set[str]] = {}
        given = json.loads(file.read_text())
        for name, found in given["tests"].items():
            if not found:
                continue
            self._seconds[name] = found["seconds"]
            self._sends[name] = len(found["queries"]) + 1
            for number in found["queries"]:
                self._of.setdefault(given["texts"][number], set()).add(name)
        self._kills: Counter[tuple[str, str, str]] = Counter()

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that may find a mutant, the likeliest and fastest first, within the budget."""
        # DuckDB's statements are not recorded, and may look like those that others send.
        names = self._sending(mutant) | self._named(mutant)
        found: list[str] = []
        left = self._budget
        place = (mutant.file, mutant.name)
        # First what has found mutants of this constant; then what is fast, sends little else, is named after
        # it and is in the folder of the same name.
        words = {word.lower() for word in mutant.name.strip("_").split("_") if len(word) > 3}
        folder = Path(mutant.file).parent.as_posix().replace("outbox_pipelines", "tests", 1) + "/"

        def rank(name: str) -> tuple[int, float]:
            named = (1 + 3 * any(word in name for word in words)) * (1 + 3 * name.startswith(folder))
            return -self._kills[*place, name], self._seconds[name] * self._sends[name] / named

        for name in sorted(names, key=rank):
            if not found or self._seconds[name] <= left:
                found.append(name)
                left -= self._seconds[name]
        return found

    def _sending(self, mutant: Mutant) -> set[str]:
        for piece in mutant.around:
            wanted = normal(piece).strip()
            if len(wanted) < _SHORTEST_PIECE and not mutant.file.endswith(".sql"):
                continue
            if found := {name for text, names in self._of.items() if wanted in text for name in names}:
                return found
        return set()

    def _named(self, mutant: Mutant) -> set[str]:
        """Return the tests of a setting, or of SQL that is shown and not sent."""
        for start, finders in FINDERS.items():
            if f"{mutant.file}:{mutant.name}".startswith(start) and (not mutant.around or ":" in start):
                return {name for name in self._seconds if any(finder in name for finder in finders)}
        return set()

    def killed(self, mutant: Mutant, test: str) -> None:
        """Let this test come first for further mutants of the same constant."""
        self._kills[mutant.file, mutant.name, test] += 1

    def limit(self, name: str) -> float:
        """Return how many seconds a test may take."""
        return max(_LEAST_SECONDS, _SLOWER * self._seconds[name])

    def quickest(self) -> list[str]:
        """Return all tests, the quickest first."""
        return sorted(self._seconds, key=self._seconds.__getitem__)


class Runner:
    """Runs these mutants in place of the collected tests.

    Args:
        report: receives each result.
        seconds: begin no further mutant after so long.
        workers: how many processes; the mutants of a constant belong to one, which learns what finds them.
    """

    def __init__(
        self,
        mutants: Sequence[Mutant],
        covering: Covering,
        report: Callable[[Mutant, Result], None],
        seconds: float,
        workers: int,
    ) -> None:
        groups = groupby(mutants, key=lambda each: (each.file, each.name))
        self._groups = [list(group) for _, group in groups]
        self._covering = covering
        self._report = report
        self._end = time.monotonic() + seconds
        self._workers = workers
        self._fit: set[str] = set()
        self._unfit: set[str] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._warm(items)
        # What children do not write to stays shared with them.
        gc.collect()
        gc.freeze()
        mutants = {mutant.id: mutant for group in self._groups for mutant in group}
        for line in self._in_workers(items):
            name, result = json.loads(line)
            self._report(mutants[name], Result(**result))
        # Before files are removed at the session's end.
        session._setupstate.teardown_exact(None)
        return True

    def _in_workers(self, items: dict[str, pytest.Item]) -> Iterator[str]:
        """Yield the results of all workers, each as a line."""
        # A pipe is a queue from which several processes can read.
        todo, asked = os.pipe()
        os.write(asked, b"".join(n.to_bytes(2, "big") for n in range(len(self._groups))))
        os.close(asked)
        reader, writer = os.pipe()
        children = []
        for _ in range(self._workers):
            if child := os.fork():
                children.append(child)
                continue
            try:
                os.close(reader)
                while number := os.read(todo, 2):
                    for mutant in self._groups[int.from_bytes(number, "big")]:
                        if time.monotonic() < self._end:
                            result = self._result(mutant, items)
                            os.write(writer, json.dumps([mutant.id, asdict(result)]).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(writer)
        os.close(todo)
        with os.fdopen(reader) as lines:
            yield from lines
        for child in children:
            os.waitpid(child, 0)

    def _result(self, mutant: Mutant, items: dict[str, pytest.Item]) -> Result:
        names = [name for name in self._covering.of(mutant) if name in items]
        began = time.monotonic()
        by, tests = self._find(mutant, [items[name] for name in names])
        # A test that fails without a mutant, too, is none.
        if not by and not tests:
            return Result("untested", "", 0, 0.0, str(mutant))
        if by:
            self._covering.killed(mutant, by)
        seconds = round(time.monotonic() - began, 1)
        return Result("killed" if by else "survived", by, tests, seconds, str(mutant))

    def _find(self, mutant: Mutant, items: list[pytest.Item]) -> tuple[str, int]:
        """Return the test that found the mutant, or "", and how many ran."""
        items = [item for item in items if item.nodeid not in self._unfit]
        by, tests, is_late = self._try(mutant, items)
        if by not in ("", _IMPORT) and (is_late or by not in self._fit):
            # It may fail here without any mutant.
            failed, _, _ = self._try(None, [item for item in items if item.nodeid == by])
            if failed:
                self._unfit.add(by)
                return self._find(mutant, items)
            self._fit.add(by)
        return by, tests

    def _warm(self, items: dict[str, pytest.Item]) -> None:
        """Run a test for each kind of server, which then stays."""
        wanted = {"stack", "server"}
        for name in self._covering.quickest():
            item = items.get(name)
            if item is not None and wanted & set(getattr(item, "fixturenames", ())):
                wanted -= set(getattr(item, "fixturenames", ()))
                # Then everything ends that does not last for the session.
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=item.session)

    def _try(self, mutant: Mutant | None, items: list[pytest.Item]) -> tuple[str, int, bool]:
        """Run tests in a process of their own.

        Returns:
            The one that failed, or ""; how many ran; whether it was out of time.
        """
        if not items:
            return "", 0, False
        limits = [self._covering.limit(item.nodeid) for item in items]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                _run(mutant, items, limits, writer)
            finally:
                os._exit(0)
        os.close(writer)
        said: list[str] = []
        is_late = False
        with os.fdopen(reader, "rb", buffering=0) as answers:
            while True:
                left = max(limits) if len(said) < 2 else limits[min(len(said) - 2, len(limits) - 1)]
                if not select.select([answers], [], [], left + _TEARDOWN_SECONDS)[0]:
                    is_late = True
                    break
                more = answers.read(65536)
                if not more:
                    break
                said += more.decode().splitlines()
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if said[-1:] == [_LATE]:
            is_late = True
            said.pop()
        if said[-1:] == [_PASSED]:
            return "", len(items), False
        # It failed, its process ended, or it took too long.
        return said[-1] if said else _IMPORT, len(said) - 1, is_late


def _run(mutant: Mutant | None, items: list[pytest.Item], limits: list[float], writer: int) -> None:
    """In the process of one mutant: name each test before it begins, and end with the first that fails."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    from tests import forks

    # The process that starts others has the mutant as well.
    forks.Forker._one = None
    os.write(writer, f"{_IMPORT}\n".encode())
    if mutant is not None:
        os.environ[patch.VARIABLE] = json.dumps([mutant.file, mutant.source()])
        _replace_parameters(items, patch.apply(mutant.file, mutant.source()))
    failed: list[bool] = []

    class Watching:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append("Timeout" in str(report.longrepr)[-500:])

    items[0].config.pluginmanager.register(Watching())
    if mutant is not None and mutant.file.endswith(".sql"):
        _forget_templates(items[0])
    # What lasts for the folder of the test that ran last, if this is another one.
    items[0].session._setupstate.teardown_exact(items[0])
    for item, limit, following in zip(items, limits, [*items[1:], items[-1].session], strict=True):
        os.write(writer, f"{item.nodeid}\n".encode())
        # Of pytest-timeout: the test fails, and its fixtures end as usual.
        item.add_marker(pytest.mark.timeout(limit, method="signal"))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failed:
            if any(failed):
                os.write(writer, f"{_LATE}\n".encode())
            return
    os.write(writer, f"{_PASSED}\n".encode())


def _replace_parameters(items: list[pytest.Item], changed: list[tuple[Any, Any]]) -> None:
    """Give tests whose parameter is a constant the mutated one."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        for name, value in parameters.items():
            for old, new in changed:
                if value is old:
                    parameters[name] = new


def _forget_templates(item: pytest.Item) -> None:
    """Let databases be migrated again, by the mutated files; the servers stay."""
    from tests import conftest

    once = conftest.Lasting.once
    kinds = ("migrated", "template")

    def renewed(self: Any, name: Any, make: Any) -> Any:
        is_template = isinstance(name, tuple) and name[0] in kinds
        return once(self, (*name, "mutant") if is_template else name, make)

    conftest.Lasting.once = renewed  # type: ignore[method-assign]
    # Of the session, and made of it.
    for fixture in ("template", "shared"):
        for definition in item.session._fixturemanager.getfixturedefs(fixture, item) or ():
            definition.cached_result = None
