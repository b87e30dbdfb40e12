"""kill -9 before each statement of each step: the next run continues."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests import forks
from tests.conftest import clean_environment, wait_until
from tests.existing import guides
from tests.existing.adopt.conftest import Adopted, Make
from tests.existing.adopt.debezium_table import published

KEY = "00000000-0000-0000-0000-000000000001"
_SESSIONS = b"""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
AND backend_type IN ('client backend', 'walsender') AND application_name <> 'tests'"""


class Lives:
    """Processes that run a step, and die."""

    def __init__(
        self, adopted: Adopted, process: subprocess.Popen[str], observer: psycopg.Connection[Any]
    ) -> None:
        self.adopted, self._process, self._observer = adopted, process, observer

    def run(self, step: str, statement: int) -> bool:
        """Whether it came to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{statement} {step}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL), (step, statement, status)
        # The server notices the crash in its own time.
        wait_until(self._is_alone, what="the sessions of the dead")
        return status == 0

    def _is_alone(self) -> bool:
        return self._observer.execute(_SESSIONS).fetchone() == (0,)


@pytest.fixture
def lives(make: Make, tmp_path: Path) -> Iterator[Lives]:
    with _lives(make(guides.D), tmp_path) as made:
        yield made


@contextmanager
def _lives(adopted: Adopted, tmp_path: Path) -> Iterator[Lives]:
    environment = adopted.environment | {"OUTBOX_ARCHIVE": str(tmp_path / "archive")}
    with (
        adopted.connect() as observer,
        forks.Popen(
            [sys.executable, "-m", "tests.existing.adopt.dying"],
            env=clean_environment() | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        yield Lives(adopted, process, observer)


@pytest.mark.extended
@pytest.mark.thorough
def test_every_statement(lives: Lives, stride: int) -> None:
    """Guards against a state from which no run continues, or in which no event can be written."""
    adopted, number = lives.adopted, itertools.count()
    deaths = 0
    for step, pace in (
        ("prepare", 1),
        ("switch", 1),
        ("drain", 1),
        ("back", 1),
        ("switch", 7),
        ("drain", 4),
    ):
        for statement in itertools.count(1, pace * stride):
            adopted.write((KEY, next(number)))
            if lives.run(step, statement):
                break
            deaths += 1
    for statement in itertools.count(1, stride):
        if lives.run("finish", statement):
            break
        deaths += 1
        adopted.write((KEY, next(number)))
    adopted.relay()
    first = list(dict.fromkeys(adopted.numbers()[KEY]))
    assert first == list(range(next(number)))
    assert deaths > 150 / stride


@pytest.mark.extended
@pytest.mark.thorough
def test_every_statement_with_a_slot(make: Make, tmp_path: Path, stride: int) -> None:
    """Guards the same where a slot's reader publishes the table, and where a command does in its place."""
    number, deaths = itertools.count(), 0
    with published(make) as table, _lives(table.adopted, tmp_path) as lives:
        for step in ("prepare", "switch", "drain", "back", "switch", "drain-rest"):
            if step == "drain-rest":
                table.publish(1)
            elif step == "drain":
                table.publish(confirm=False)
            for statement in itertools.count(1, stride * (4 if step in ("prepare", "switch") else 1)):
                table.write(next(number))
                if lives.run(step, statement):
                    break
                deaths += 1
            if step == "back":
                table.adopted.relay()
        for statement in itertools.count(1, 3 * stride):
            if lives.run("finish", statement):
                break
            table.write(next(number))
            deaths += 1
        assert not table.has_slot()
        table.adopted.relay()
        first = list(dict.fromkeys(table.numbers()))
    assert first == list(range(next(number)))
    assert deaths > 60 / stride
