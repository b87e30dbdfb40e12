"""Replays of a run: commands that send published events again beside live ones, and are killed at that.

Invariants:
- What a replay has to send is what the outbox calls published right before it begins; whether that was
  committed, and how it was published first, the judge knows from elsewhere.
- One that ends before it is complete is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psycopg

from tests.conftest import command
from tests.history import questions
from tests.history.processes import Process
from tests.history.record import Replay

# It lasts so long, so that it meets faults.
_SECONDS = 5
_LEAST_RATE = 100
_PAUSE_SECONDS = 0.5


class Replaying:
    """The replays of one run, one at a time.

    Args:
        name: of its programs.
        environment: of an operator's commands.
    """

    def __init__(self, dsn: str, name: str, environment: Mapping[str, str], directory: Path) -> None:
        self._dsn, self._name = dsn, name
        self._environment, self._directory = environment, directory
        self._due: dict[str, list[str]] = {}
        """By reason, the tokens of the events that are to be sent."""
        self._resumed: set[str] = set()
        self._process: Process | None = None
        self._rate = _LEAST_RATE
        self._resume_at = 0.0

    def begin(self) -> None:
        """Begin one, with all that is published, unless the database does not answer."""
        with suppress(psycopg.OperationalError), psycopg.connect(self._dsn, connect_timeout=5) as connection:
            due = questions.published(connection)
            reason = f"replay {len(self._due) + 1}"
            self._due[reason] = due
            self._rate = max(_LEAST_RATE, len(due) // _SECONDS)
            self._start("--where", "true", "--same-topic", "--reason", reason)

    def is_under_way(self) -> bool:
        """Return whether the one that begins sends, or has ended."""
        if self._process is None or self._process.exit_code is not None:
            return True
        with suppress(psycopg.OperationalError), psycopg.connect(self._dsn, connect_timeout=5) as connection:
            return questions.open_replay(connection) is not None
        return False

    def kill(self) -> None:
        """End it with kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def is_complete(self) -> bool:
        """Resume one that ended too early; return whether none is left."""
        if self._process is not None:
            if self._process.exit_code is None:
                return False
            self._process = None
        with suppress(psycopg.OperationalError), psycopg.connect(self._dsn, connect_timeout=5) as connection:
            found = questions.open_replay(connection)
            if found is None:
                return True
            if time.monotonic() > self._resume_at:
                self._resumed.add(found)
                self._start("--resume", found)
        return False

    def recorded(self) -> list[Replay]:
        """Return those that are done, with what they had to send."""
        with psycopg.connect(self._dsn) as connection:
            return [
                Replay(found, self._due[reason], found in self._resumed)
                for found, reason in questions.replays(connection)
            ]

    def _start(self, *arguments: str) -> None:
        words = command("replay", *arguments, "--rate", str(self._rate))
        self._process = Process(self._name, words, self._environment, self._directory)
        self._process.start()
        self._resume_at = time.monotonic() + _PAUSE_SECONDS
