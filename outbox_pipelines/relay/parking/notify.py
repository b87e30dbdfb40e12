"""Reports dead letters: in the log, in a metric, and by the operator's command.

Invariants:
- An error in the log for those that are alike, a metric for each. The command runs at least once for each,
  however the relay ends: the table records where it is due.
- Bounded: `_WORKERS` processes at once, `room` more in the queue, whatever the number of dead letters.
- Nothing here delays the relay or makes it fail. A command that fails or takes too long is logged and counts
  as run.
- If a command has not run when the relay ends, `done` does not return it, and the caller can run it later. So
  it runs at least once, and again if the relay ended while it ran.
- The command gets no secret of the relay: of the relay's environment it gets only what `_INHERITED` names.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO, Any, Final

import psycopg

from outbox_pipelines.core import log
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.relay.core.outcomes import ShardLostError
from outbox_pipelines.relay.core.parked import DeadLetter
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.relay.telemetry.metrics import Metrics
from outbox_pipelines.settings import RelaySettings

_LOG = logging.getLogger(__name__)
_COMMAND_SECONDS: Final = 30.0
_WORKERS: Final = 4
# Dead letters in the queue; all others wait in the table.
_MOST_QUEUED: Final = 16
_EVERY: Final = 1.0
_LOOK_SECONDS: Final = 0.02
# The kind of repeated lines.
_COMMAND: Final = "command"
_CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# Variables that programs need to run. The relay's settings, PGPASSWORD and cloud keys are not passed on.
_INHERITED: Final = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", *_CERTIFICATES)
)


class DeadLetterRuns:
    """Threads that run the command, started by the first dead letter.

    Args:
        command: OUTBOX_DEAD_LETTER_COMMAND; if it is empty, nothing is run.
        most: the length of the queue.
    """

    def __init__(self, command: str, *, most: int) -> None:
        self._command = command
        self._most = most
        self._change = threading.Condition()
        self._queue: deque[tuple[int, str]] = deque()
        self._running: dict[int, subprocess.Popen[bytes] | None] = {}
        self._done: list[int] = []
        self._threads: list[threading.Thread] = []
        self._end = False
        self._lines = RepeatedLines(_LOG)

    @property
    def room(self) -> int:
        """How many more dead letters it takes."""
        return self._most - len(self._queue) if self._command else 0

    def submit(self, seq: int, description: str) -> None:
        """Run the command for a dead letter; call it only while there is room."""
        with self._change:
            self._queue.append((seq, description))
            self._change.notify()
            if len(self._threads) < _WORKERS:
                thread = threading.Thread(
                    target=log.inherit(self._work), name="outbox-dead-letter", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def under_way(self) -> list[int]:
        """Return the seqs of dead letters that are queued, running, or not yet fetched by `done`."""
        with self._change:
            return [*(seq for seq, _ in self._queue), *self._running, *self._done]

    def done(self) -> list[int]:
        """Return the seqs of dead letters for which the command has run since the last call."""
        with self._change:
            done, self._done = self._done, []
        return done

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until nothing is queued or running; return whether this succeeded."""
        with self._change:
            return self._change.wait_for(lambda: not (self._queue or self._running), seconds)

    def close(self) -> int:
        """End what is queued or running; return the number."""
        with self._change:
            self._end = True
            left = len(self._queue) + len(self._running)
            self._queue.clear()
            for process in self._running.values():
                if process is not None:
                    _kill(process)
            self._change.notify_all()
        for thread in self._threads:
            thread.join(1.0)
        return left

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._end)
                if self._end:
                    return
                seq, description = self._queue.popleft()
                self._running[seq] = None
            self._run(seq, description)
            with self._change:
                del self._running[seq]
                if not self._end:
                    self._done.append(seq)
                self._change.notify_all()

    def _run(self, seq: int, description: str) -> None:
        try:
            with _file(description) as stdin:
                # In a new process group, so that programs started by the shell end with it.
                process = subprocess.Popen(
                    self._command,
                    shell=True,
                    env=_environment(os.environ),
                    stdin=stdin,
                    start_new_session=True,
                )
            with self._change:
                self._running[seq] = process
            try:
                process.wait(_COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                _kill(process)
                process.wait()
                self._report(
                    "OUTBOX_DEAD_LETTER_COMMAND took more than %.0f s and was killed", _COMMAND_SECONDS
                )
                return
            if process.returncode == 0:
                self._lines.end(_COMMAND, "OUTBOX_DEAD_LETTER_COMMAND succeeds again")
            elif not self._end:
                self._report("OUTBOX_DEAD_LETTER_COMMAND failed with exit code %d", process.returncode)
        except OSError as error:
            self._report("OUTBOX_DEAD_LETTER_COMMAND failed: %s", error)

    def _report(self, message: str, detail: object) -> None:
        self._lines.log(_COMMAND, message, detail, level=logging.ERROR)


def describe(event: Event, attempts: int, error: str, *, remedy: str) -> str:
    """Return a dead letter as one JSON object, without its payload."""
    return json.dumps({"kind": "dead-letter", **fields(event, attempts, error), "help": remedy})


def fields(event: Event, attempts: int, error: str) -> dict[str, Any]:
    """Return the fields of a dead letter for logs and commands."""
    return {
        "id": event.id,
        "seq": event.own_seq,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "event_type": event.event_type,
        "attempts": attempts,
        "error": error,
    }


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command."""
    return {name: ours[name] for name in ours if name in _INHERITED or name.startswith("LC_")}


@contextmanager
def _file(text: str) -> Iterator[IO[bytes]]:
    """Yield a file with this text: a pipe would be empty if the relay were killed before it has written."""
    # In memory where the system can, since a container may have no directory to write to.
    in_memory = sys.platform == "linux"
    with os.fdopen(os.memfd_create("dead-letter"), "w+b") if in_memory else TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class DueCommands:
    """Runs the command for the dead letters of a shard; uses the session that owns the shard."""

    def __init__(self, settings: RelaySettings, shard: Shard) -> None:
        self._shard = shard
        self._is_wanted = bool(settings.dead_letter_command)
        self._runs = DeadLetterRuns(settings.dead_letter_command.reveal(), most=_MOST_QUEUED)
        self._look_at = 0.0

    def look(self, now: float) -> None:
        """Start as many commands as there is room for, and record which have run."""
        if not self._is_wanted:
            return
        if ran := self._runs.done():
            self._shard.execute(parking_sql.COMMANDS_RAN, {"seqs": ran})
            self._look_at = 0.0
        room = self._runs.room
        if now < self._look_at or not room:
            return
        self._look_at = now + _EVERY
        found = {"room": room, "under_way": self._runs.under_way()}
        for row in self._shard.execute(parking_sql.COMMANDS, found):
            *columns, attempts, error = row
            event = Event._make([*columns, "", None])
            remedy = f"outbox dead-letters show {event.id}"
            self._runs.submit(event.seq, describe(event, attempts, error, remedy=remedy))

    def close(self, seconds: float) -> None:
        """Wait for the commands for at most `seconds`; the others run later."""
        # If the session is lost, they run again.
        with suppress(ShardLostError, psycopg.Error):
            deadline = time.monotonic() + seconds
            self.look(math.inf)
            while not self._runs.wait(_LOOK_SECONDS) and time.monotonic() < deadline:
                # Also a heartbeat.
                self._shard.execute(parking_sql.COMMANDS_RAN, {"seqs": self._runs.done()})
                self.look(math.inf)
        self._runs.close()
        with suppress(ShardLostError, psycopg.Error):
            self.look(-math.inf)


def reporter(metrics: Metrics) -> Callable[[DeadLetter], None]:
    """Return what reports a dead letter, and returns immediately."""
    lines = RepeatedLines(_LOG)

    def report(letter: DeadLetter) -> None:
        metrics.dead_lettered()
        event = letter.event
        lines.log(
            (event.aggregate_type, event.event_type, letter.error),
            "dead letter: %s, after %d attempts: %s",
            event,
            letter.attempts,
            letter.error,
            level=logging.ERROR,
            extra=fields(event, letter.attempts, letter.error),
        )

    return report
