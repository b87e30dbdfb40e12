"""kill -9 of a cut-over and back: what is left is named, and the next command continues."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from outbox_pipelines.database import slot_reader
from outbox_pipelines.quality.slots import Slots
from outbox_pipelines.relay.read.slot import slot_cutover, slot_sql
from outbox_pipelines.relay.read.slot.slot_cutover import read
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import Outbox, clean_environment, either, wait_until
from tests.relay.parked import numbers_by_key
from tests.relay.slot.test_switch import writing
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import create_topic

_PROGRAM = """
import os, signal, sys
import psycopg
from outbox_pipelines.database import slot_reader
from outbox_pipelines.relay.read.slot import slot_sql
deadly, when = sys.argv[1:3]
named = {**vars(slot_sql), **vars(slot_reader)}
statements = {text: name for name, text in named.items() if isinstance(text, str)}
execute = psycopg.Connection.execute
def dying(self, query, *given, **named):
    is_deadly = isinstance(query, str) and statements.get(query) == deadly
    if is_deadly and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    done = execute(self, query, *given, **named)
    if is_deadly and when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return done
psycopg.Connection.execute = dying
sys.argv = ["outbox", *sys.argv[3:]]
from outbox_pipelines.__main__ import main
main()
"""
_MADE = ("BEGIN_SLOT", "BEGIN_SNAPSHOT", "FIRST_SNAPSHOT", "SLOT_IS_MADE")
_DROPPED = ("END_SLOT", "DROP_SLOT", "NO_SLOT")
_POINTS = (
    *(("polling", "cdc", name) for name in _MADE),
    *(("cdc", "polling", name) for name in _DROPPED),
)
_COMMAND = re.compile(r"`outbox (cutover --to \w+|cdc \w+|relay)`")


@dataclass(frozen=True)
class Point:
    """Where a command dies: on the way from one source to the other, at a statement."""

    source: str
    target: str
    name: str
    when: str


def points(stride: int) -> Iterator[Point]:
    """Each point, or every so many of them."""
    unknown = {name for _, _, name in _POINTS} - {*vars(slot_sql), *vars(slot_reader)}
    assert not unknown, f"no statements of relay/read/slot/slot_sql.py or database/slot_reader.py: {unknown}"
    # Neighbors are alike.
    return iter([Point(*point, when) for point in _POINTS for when in ("before", "after")][::stride])


class Commands:
    """`outbox cutover` for an outbox."""

    def __init__(self, settings: Settings, environment: dict[str, str]) -> None:
        self._settings, self._environment = settings, environment

    def run(self, target: str, point: Point | None = None) -> None:
        """Change to `target`, or die on the way."""
        name, when = ("", "") if point is None else (point.name, point.when)
        done = forks.run(
            [sys.executable, "-c", _PROGRAM, name, when, "cutover", "--to", target, "--wait-seconds", "40"],
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
        """Whether events are read there, and nothing is left of the other way."""
        found = self.look()
        if found.source != target or found.problems or found.changing:
            return False
        return found.reader is not None if target == "cdc" else (found.slot, found.exists) == (None, False)

    def die(self, point: Point) -> None:
        """Let the command die there; see that what is left is named, with a command that continues."""
        self.run(point.target, point)
        wait_until(lambda: not self.look().changing, what="the end of the sessions of the dead")
        wait_until(
            lambda: (
                any(_COMMAND.search(problem) for problem in self.look().problems)
                or any(self.is_complete(each) for each in (point.source, point.target))
            ),
            what=f"a state that is named after {point}: {self.look()}",
        )


@pytest.mark.extended
@pytest.mark.thorough
def test_every_statement(outbox: Outbox, stride: int) -> None:
    """Guards against a change of which one half is forgotten: in the row or in the slot."""
    settings = quick(outbox)
    create_topic(outbox)
    commands = Commands(settings, clean_environment() | outbox.environment)
    deaths = 0
    with running(settings), writing(outbox) as counts:
        for point in points(2 * stride - 1):
            if not commands.is_complete(point.source):
                commands.run(point.source)
            commands.die(point)
            deaths += 1
            # The next command continues, in one direction or the other.
            commands.run(point.target if deaths % 2 else point.source)
        commands.run("polling")
    # What the writers committed at their end.
    with running(settings):
        wait_until_relayed(outbox)
    assert deaths > 8 / stride
    assert numbers_by_key(outbox.messages()) == {key: list(range(count)) for key, count in counts.items()}
    with outbox.connect() as connection:
        query = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        assert connection.execute(query).fetchone() == (0,)


_WAITS = """
SELECT count(*) FROM pg_replication_slots WHERE active AND confirmed_flush_lsn IS NULL
AND database = current_database()"""


@pytest.mark.parametrize("server", either("does not notice", "notices"))
def test_a_death_while_the_server_makes_the_slot(outbox: Outbox, server: str) -> None:
    """Guards against a slot that the server makes for no relay, while a transaction runs for hours."""
    program = "from outbox_pipelines.core import session; import sys\n"
    if server == "does not notice":
        program += "session.OWN['client_connection_check_interval'] = '0'\n"
    program += "sys.argv = ['outbox', 'cutover', '--to', 'cdc']\n"
    program += "from outbox_pipelines.__main__ import main; main()"
    with outbox.connect(autocommit=False) as slow, outbox.connect() as admin:
        slow.execute("SELECT pg_current_xact_id()")

        def waits() -> bool:
            return admin.execute(_WAITS).fetchone() == (1,)

        environment = clean_environment() | outbox.environment
        with forks.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL
        ) as process:
            wait_until(waits, what="a slot that is being made")
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: not read(outbox.settings).changing, what="the end of the dead one's session")
        (problem,) = read(outbox.settings).problems
        assert "setup was interrupted while it made the slot" in problem
        if server == "notices":
            wait_until(lambda: not waits(), what="a server that makes no slot")
        else:
            assert "of the server still makes it" in problem
            assert waits()
        said: list[str] = []
        slot_cutover.run(outbox.settings, "polling", seconds=30, say=said.append)
        # The server may not yet have removed what it had begun.
        assert said[-1] == "relays read between snapshots"
        found = read(outbox.settings)
        assert (found.slot, found.exists, found.problems) == (None, False, [])
