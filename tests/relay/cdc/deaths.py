"""kill -9 of `outbox cutover` before or after a statement or a call of Kafka Connect, by its name."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from outbox_pipelines import slot_reader
from outbox_pipelines.quality.slots import Slots
from outbox_pipelines.relay.cdc import queries
from outbox_pipelines.relay.cdc.status import read
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import wait_until

_PROGRAM = """
import os, signal, sys
import psycopg
from outbox_pipelines.debezium import connect
from outbox_pipelines import slot_reader
from outbox_pipelines.relay.cdc import queries
deadly, when = sys.argv[1:3]
named = {**vars(queries), **vars(slot_reader)}
statements = {text: name for name, text in named.items() if isinstance(text, str)}
def dying(original, name_of):
    def run(*given, **named):
        is_deadly = name_of(*given) == deadly
        if is_deadly and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = original(*given, **named)
        if is_deadly and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return run
def statement(_, query, *more):
    return statements.get(query) if isinstance(query, str) else None
def call(worker, method, path, *more):
    parts = path.partition("?")[0].split("/")[3:]
    return f"{method} {parts[0] if parts else 'connector'}"
psycopg.Connection.execute = dying(psycopg.Connection.execute, statement)
connect._exchange = dying(connect._exchange, call)
sys.argv = ["outbox", *sys.argv[3:]]
from outbox_pipelines.__main__ import main
main()
"""
_SLOT = ("BEGIN_SLOT", "BEGIN_SNAPSHOT", "FIRST_SNAPSHOT", "SLOT_IS_MADE")
_THERE = ("PUT config", "BEGIN_CONNECTOR", "HAS_SLOT", "PUT config", "GET status")
_BACK = ("PUT stop", "GET status", "END_CONNECTOR", "DELETE offsets", "DELETE connector", "FORGET_CONNECTOR")
_DROP = ("END_SLOT", "DROP_SLOT", "NO_SLOT")
_POINTS = (
    *(("polling", "debezium", name) for name in (*_SLOT, *_THERE)),
    *(("cdc", "debezium", name) for name in _THERE),
    *(("debezium", "cdc", name) for name in _BACK),
    *(("debezium", "polling", name) for name in (*_BACK, *_DROP)),
)
_COMMAND = re.compile(r"`outbox (cutover --to \w+|cdc \w+|relay)`")


@dataclass(frozen=True)
class Point:
    """Where a command dies: on the way from one publisher to another, at a statement or a call."""

    source: str
    target: str
    name: str
    when: str


def points(stride: int) -> Iterator[Point]:
    """Each point, or every so many of them."""
    found = [Point(*point, when) for point in dict.fromkeys(_POINTS) for when in ("before", "after")]
    unknown = {point.name for point in found if " " not in point.name} - {*vars(queries), *vars(slot_reader)}
    assert not unknown, f"no statements of relay/cdc/queries.py or slot_reader.py: {unknown}"
    # Neighbours are alike.
    return iter(found[::stride])


class Commands:
    """`outbox cutover` for an outbox."""

    def __init__(self, settings: Settings, environment: dict[str, str], password: str) -> None:
        self._settings, self._environment = settings, environment
        self._options = ("--password", password, "--seconds", "40")

    def run(self, target: str, point: Point | None = None) -> None:
        """Change to `target`, or die on the way."""
        name, when = ("", "") if point is None else (point.name, point.when)
        done = forks.run(
            [sys.executable, "-c", _PROGRAM, name, when, "cutover", "--to", target, *self._options],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
        )
        expected = 0 if point is None else -signal.SIGKILL
        assert done.returncode == expected, (point, target, done.stdout, done.stderr)
        if point is None:
            wait_until(lambda: self.is_complete(target), seconds=30, what=f"{target}: {self.look()}")

    def look(self) -> Slots:
        return read(self._settings)

    def is_complete(self, target: str) -> bool:
        """Whether this one publishes, and nothing is left of another."""
        found = self.look()
        if found.source != target or found.problems or found.changing:
            return False
        if target == "polling":
            return (found.slot, found.exists, found.connector) == (None, False, None)
        return found.reader is not None and (found.connector is not None) == (target == "debezium")

    def die(self, point: Point) -> None:
        """Let the command die there; see that what is left is named, with a command that continues."""
        self.run(point.target, point)
        wait_until(lambda: not self.look().changing, what="the end of the sessions of the dead")
        wait_until(
            lambda: (
                any(_COMMAND.search(problem) for problem in self.look().problems)
                # Between the two: the relay reads the slot, before or after a connector.
                or any(self.is_complete(each) for each in (point.source, point.target, "cdc"))
            ),
            what=f"a state that is named after {point}: {self.look()}",
        )


def die_everywhere(commands: Commands, stride: int) -> int:
    """Die at each point, continue in one direction or the other; return the number of deaths."""
    deaths = 0
    for point in points(stride):
        if not commands.is_complete(point.source):
            commands.run(point.source)
        commands.die(point)
        deaths += 1
        onward, back = (point.target, point.source) if deaths % 2 else (point.source, point.target)
        commands.run(onward)
        if deaths % 4 == 0:
            commands.run(back)
    commands.run("polling")
    return deaths
