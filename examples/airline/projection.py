"""The board at work in a process that is killed again and again, and what it shows beside what is true.

Invariants:
- What is true are the airline's tables; the board's process cannot read them.
- It is killed once at least, and ends with this process, however that ends.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from examples.airline import board, queries
from outbox_pipelines import consumer
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import bound, last_lines
from outbox_pipelines.settings import Settings

_TICK_SECONDS: Final = 0.1
_KILL_SECONDS: Final = 20.0
_STOP_SECONDS: Final = 30.0
# Who handles nothing for so long has nothing more to handle, or will not.
_STUCK_SECONDS: Final = 10.0


class Board:
    """The process; `start` it, `tend` to it, `finish` it, and `stop` it in any case."""

    def __init__(self, settings: Settings, home: Path) -> None:
        self.killed = 0
        self.events = 0
        """Handled, once it has finished."""
        self._settings = settings
        self._log = home / "board.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_at = 0.0

    def start(self) -> None:
        """Makes its tables, and begins."""
        with connect(self._settings, name="outbox demo: tables") as connection:
            consumer.migrate(connection)
            connection.execute(board.TABLES)
        self._launch()

    def tend(self, connection: Connection) -> None:
        """Kills it when its time has come, and starts it again; to be called again and again.

        Raises:
            SetupError: the process has ended unexpectedly.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            raise SetupError(f"the board has ended: {last_lines(self._log.read_text(errors='replace'), 1)}")
        if time.monotonic() >= self._kill_at and handled(connection):
            self._process.kill()
            self._process.wait()
            self.killed += 1
            self._kill_at = time.monotonic() + _KILL_SECONDS
            self._launch()

    def finish(self, connection: Connection) -> None:
        """Waits until it has handled everything, or handles no more, and ends it.

        Raises:
            SetupError: the process has ended unexpectedly.
        """
        ((departures,),) = connection.execute(queries.DEPARTURES)
        if self.killed:
            self._kill_at = math.inf
        moved_at = time.monotonic()
        while time.monotonic() - moved_at < _STUCK_SECONDS:
            self.tend(connection)
            before, self.events = self.events, handled(connection)
            if self.events != before:
                moved_at = time.monotonic()
            if self.events >= departures and self.killed:
                break
            time.sleep(_TICK_SECONDS)
        self.stop()

    def stop(self) -> None:
        """Ends it in order."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                bound([sys.executable, "-m", "examples.airline.board"], signal.SIGTERM),
                env={
                    **os.environ,
                    "OUTBOX_DSN": self._settings.require_dsn(),
                    "OUTBOX_KAFKA": self._settings.require_kafka(),
                    "OUTBOX_SCHEMA": self._settings.db_schema,
                    "OUTBOX_TOPIC": self._settings.topic,
                    # The working directory is the user's: no place to import from.
                    "PYTHONSAFEPATH": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the demo, which then ends it in order.
                start_new_session=True,
            )


def handled(connection: Connection) -> int:
    """How many events the board has handled by now."""
    ((events,),) = connection.execute(queries.HANDLED, {"source": board.SOURCE})
    return int(events)


def differences(connection: Connection) -> list[str]:
    """What the board shows otherwise than the airline's tables, in words; nothing where they are equal."""
    return [
        f"{kind} {name}: the board says {shown or 'nothing'}, the tables say {true or 'nothing'}"
        for kind, name, shown, true in connection.execute(queries.DIFFERENCES)
    ]
