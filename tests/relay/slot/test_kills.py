"""kill -9 before each statement of a cut-over, or each second one: the next call continues, or goes back."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys

import pytest

from outbox_pipelines.relay.read.slot.slot_cutover import read
from tests import forks
from tests.conftest import Outbox, clean_environment, wait_until
from tests.relay.parked import numbers_by_key
from tests.relay.slot.test_switch import writing
from tests.relay.threads import owners, quick, running, wait_until_relayed

_PROGRAM = """
import os, signal, sys
import psycopg
left = int(sys.argv[1])
execute = psycopg.Connection.execute
def dying(*arguments, **named):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(*arguments, **named)
psycopg.Connection.execute = dying
sys.argv = ["outbox", *sys.argv[2:]]
from outbox_pipelines.__main__ import main
main()
"""


def _comes_to_its_end(outbox: Outbox, statement: int, *arguments: str) -> bool:
    """Whether a command ended before it was killed at a statement."""
    done = forks.run(
        [sys.executable, "-c", _PROGRAM, str(statement), *arguments],
        env=clean_environment() | outbox.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == 0


@pytest.mark.thorough
def test_every_statement(outbox: Outbox, stride: int) -> None:
    """Guards against a slot that is forgotten, and events that an unfinished cut-over loses or repeats."""
    settings = quick(outbox)
    deaths = 0
    with running(settings), writing(outbox) as counts:
        wait_until(lambda: owners(outbox) != [None], what="a relay")
        for target in ("cdc", "polling"):
            for statement in itertools.count(0, stride):
                if _comes_to_its_end(outbox, statement, "cutover", "--to", target, "--wait-seconds", "30"):
                    break
                deaths += 1
                # A death in the middle of one change, and the other one as the next.
                if statement % 6 == 4:
                    back = "polling" if target == "cdc" else "cdc"
                    assert _comes_to_its_end(outbox, 1_000, "cutover", "--to", back, "--wait-seconds", "30")
                    assert read(settings).source == back
            assert read(settings).source == target
            assert read(settings).exists == (target == "cdc")
    with running(settings):
        wait_until_relayed(outbox)
    assert deaths > 30 / stride
    assert numbers_by_key(outbox.messages()) == {key: list(range(count)) for key, count in counts.items()}
    with outbox.connect() as connection:
        query = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        assert connection.execute(query).fetchone() == (0,)
