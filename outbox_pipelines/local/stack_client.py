"""Use the local stack: acquire the lease, ensure that a supervisor runs, wait until its servers answer.

Invariants:
- The lease is acquired first: a stack that is found does not stop.
- While the supervisor's lock is locked, `state.json` is that supervisor's: files of an earlier one are
  cleared, under the start lock, before the lock is acquired for the next.
- A supervisor ends automatically on failure, so a client waits for as long as the supervisor runs.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import jars, kafka, lease, postgres, stack_state
from outbox_pipelines.local.stack_state import KAFKA, KEEP, POSTGRES, STOP, Home, State
from outbox_pipelines.settings import LocalSettings

ATTEMPTS = 3
# Longer than killing two servers takes.
STOP_SECONDS = 60.0
# The supervisor takes the lease for an instant to see whether it is free: one attempt is not enough.
_GLANCE_SECONDS = 0.3


# A terminal sends these to the command as well as to us.
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
FROM_OTHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Stack:
    """Where the servers are: a libpq connection string, and bootstrap servers as host:port."""

    dsn: str
    kafka: str


def home_of(settings: LocalSettings) -> Home:
    """The directory of the settings' local stack."""
    return Home(settings.local_dir.expanduser().absolute())


@contextmanager
def stack(settings: LocalSettings, say: Callable[[str], None] = lambda _: None) -> Iterator[Stack]:
    """Provide PostgreSQL and Kafka for the length of the block.

    Servers named in the settings are used as they are. The others come from the local stack, which is started
    if it does not run, shared by all users of the same ``local_dir``, and continues for
    ``local_grace_seconds`` after its last user.

    Args:
        settings: the servers, or the directory of the local ones.
        say: called with a line of text before a slow step.

    Raises:
        SetupError: the local stack cannot be started on this machine; the message says what is missing.
    """
    given = {POSTGRES: settings.dsn.reveal(), KAFKA: settings.kafka}
    wanted = [name for name, value in given.items() if not value]
    if not wanted:
        yield Stack(settings.dsn.reveal(), settings.kafka)
        return
    home = home_of(settings)
    home.make()
    with lease.locked(home.lease, shared=True, seconds=math.inf):
        if KAFKA in wanted and not jars.place(jars.KAFKA, settings.local_jars).is_dir():
            say("fetching Apache Kafka (43 MB), only this time …")
        state = _started(home, settings, wanted)
        yield Stack(settings.dsn.reveal() or state.dsn, settings.kafka or state.kafka)


def running(home: Home) -> State | None:
    """Return the state that the running supervisor reports; None without a supervisor."""
    return home.read() if home.path.is_dir() and lease.is_held(home.lock) else None


def stop(home: Home, *, force: bool = False, even_if_kept: bool = True) -> bool:
    """Stop the stack and wait for its end; return False if others use it, or it is to be kept.

    Raises:
        SetupError: it does not end.
    """
    if running(home) is None:
        return True
    if home.asked(KEEP) and not even_if_kept:
        return False
    # Kept until the servers have ended: a new client waits, and then starts its own.
    with lease.locked(home.lease, seconds=_GLANCE_SECONDS) as unused:
        if unused is None and not force:
            return False
        deadline = time.monotonic() + STOP_SECONDS
        while lease.is_held(home.lock):
            if time.monotonic() > deadline:
                raise SetupError(f"the local stack does not stop (log: {home.log})")
            home.ask(STOP)
            time.sleep(lease.POLL_SECONDS)
    return True


def forget(home: Home) -> bool:
    """Remove the servers' data; return False while they run, or a client waits for them."""
    if not home.path.is_dir():
        return True
    with lease.locked(home.lease, seconds=_GLANCE_SECONDS) as unused:
        if unused is None or lease.is_held(home.lock):
            return False
        for data in (home.path / "kafka", *home.path.glob("postgres-*/")):
            if data.is_dir():
                shutil.rmtree(data)
    return True


def _started(home: Home, settings: LocalSettings, wanted: list[str]) -> State:
    attempts = 0
    waited = False
    while True:
        for name in wanted:
            home.ask(name)
        if lease.is_held(home.lock):
            waited = True
            state = home.read()
            if _serves(state, wanted):
                return state
        elif waited and (problem := home.read().error):
            raise SetupError(problem)
        elif attempts == ATTEMPTS:
            raise SetupError(f"the local stack ended during its start (log: {home.log})")
        elif _start(home, settings):
            attempts += 1
            waited = True
        time.sleep(lease.POLL_SECONDS)


def _serves(state: State, wanted: list[str]) -> bool:
    # The supervisor may not have detected yet that a server has just crashed.
    return (POSTGRES not in wanted or bool(state.dsn and postgres.answers(state.dsn))) and (
        KAFKA not in wanted or bool(state.kafka and kafka.answers(state.kafka))
    )


def _start(home: Home, settings: LocalSettings) -> bool:
    """Start a supervisor; return False if another client is starting one."""
    plan = stack_state.Plan(
        directory=str(home.path),
        jars=str(settings.local_jars.expanduser().absolute()),
        postgres=str(settings.local_postgres.expanduser().absolute()) if settings.local_postgres else "",
        grace_seconds=settings.local_grace_seconds,
    )
    with lease.locked(home.start_lock) as starting:
        if starting is None or lease.is_held(home.lock):
            return False
        home.clear()
        with lease.locked(home.lock) as lock:
            if lock is None:
                return False
            stack_state.spawn(plan, lock)
            return True


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run to the end; the exit code as a shell gives it: 128 + n for a command that signal n ended.

    Raises:
        OSError: the command cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number in FROM_TERMINAL and _terminal_is_ours():
            return
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (*FROM_TERMINAL, *FROM_OTHERS)}
    try:
        child = subprocess.Popen(command, env=environment)
        # A signal may have arrived before the child process was known.
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _terminal_is_ours() -> bool:
    """Return whether keys such as Ctrl-C reach our process group, and with it the command."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
