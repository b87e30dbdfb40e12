"""Programs that a test kills, freezes and starts again.

Invariants:
- A program ends with the process that started it, and is signalled by its own pid alone.
- What it prints is kept in one file over all its lives.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from outbox_pipelines.local.server import last_lines
from tests import forks
from tests.conftest import clean_environment
from tests.history import standstill


class Process:
    """One program; `start` it first."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        self.name = name
        self.log = directory / f"{name.replace(' ', '-')}.log"
        self._command = command
        self._environment = {**clean_environment(), **environment}
        self.orders: Mapping[str, str] = {}
        """Additional environment of its next run."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = forks.Popen(
                self._command,
                env={**self._environment, **self.orders},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """How it ended on its own; None while it runs, or after we have ended it."""
        return self._process.poll() if self._process is not None else None

    @property
    def last_words(self) -> str:
        """The end of what it printed in this life."""
        if not self.log.exists():
            return ""
        return last_lines(self.log.read_bytes()[self._log_start :].decode(errors="replace"), 2)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """Asks it to end; its exit code."""
        return self._end(signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Has it print what its threads are doing; the program must have called `standstill.listen`."""
        self._signal(standstill.SIGNAL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        # A frozen program would take the signal when it is thawed.
        self.thaw()
        self._signal(number)
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._process.kill()
            code = self._process.wait()
            # What its threads were doing: more than the last words of a report.
            said = self.log.read_bytes()[self._log_start :].decode(errors="replace")
            print(f"{self.name} did not end by signal {number}:", *said.splitlines()[-100:], sep="\n")
        self._process = None
        return code
