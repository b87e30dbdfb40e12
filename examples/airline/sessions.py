"""The relay under Dagster: runs of the job `relay_session`, each handing over to the next while events flow.

Invariants:
- Each run is `dagster job execute` in a process of its own, on one real instance in `home`.
- At most two live at a time: the one that holds the shard, and its successor.
- They are started by the main thread and end with this process, however it ends (see `local.launch`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import outbox_pipelines
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import bound
from outbox_pipelines.settings import Settings

# The first hand-over comes soon, so that every demo has one; the others seldom, as each costs 4 s of a core.
_FIRST_SECONDS: Final = 5.0
_LATER_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 30.0

_JOB: Final = ("--module-name", "outbox_pipelines.definitions", "--job", "relay_session")
_TEMPLATE: Final = Path(outbox_pipelines.__path__[0]) / "defs" / "dagster.yaml"


def make_home(path: Path) -> None:
    """A directory for DAGSTER_HOME, with the instance that the pipelines ship."""
    _temporary(path).mkdir(parents=True, exist_ok=True)
    shutil.copy(_TEMPLATE, path / "dagster.yaml")


def environment(settings: Settings, home: Path, session_seconds: float) -> dict[str, str]:
    """Return the environment of a Dagster process, with the outbox's settings."""
    return {
        **base_environment(home),
        "OUTBOX_DSN": settings.require_dsn(),
        "OUTBOX_KAFKA": settings.require_kafka(),
        "OUTBOX_SCHEMA": settings.db_schema,
        "OUTBOX_TOPIC": settings.topic,
        "OUTBOX_SESSION_SECONDS": str(session_seconds),
        **({"OUTBOX_ARCHIVE": settings.archive} if settings.archive else {}),
        **({"OUTBOX_CATALOG_FILE": str(settings.catalog_file)} if settings.catalog_file else {}),
    }


def base_environment(home: Path) -> dict[str, str]:
    """Return the environment of a Dagster process, without settings of an outbox."""
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        # What a killed process leaves goes with the home.
        "TMPDIR": str(_temporary(home)),
        # The working directory, where `-m` would look first, is the user's: no place to import from.
        "PYTHONSAFEPATH": "1",
    }


def _temporary(home: Path) -> Path:
    return home / "tmp"


class Sessions:
    """Relay sessions, one after the other, until `stop`."""

    def __init__(self, settings: Settings, home: Path) -> None:
        self._settings = settings
        self._home = home
        self._runs: list[subprocess.Popen[bytes]] = []
        self._next_at = 0.0
        make_home(home)

    def tend(self, published: int = 0) -> None:
        """Launches the next session when its time has come; to be called again and again.

        Args:
            published: events that are published by now. Before the first of them there is nothing to hand
                over, and the first session may still be making the instance's tables, which two cannot do.

        Raises:
            SetupError: a session failed.
        """
        for number, run in enumerate(self._runs):
            if run.poll():
                raise SetupError(f"relay session {number + 1} failed: {self._last_words(number)}")
        living = [run for run in self._runs if run.poll() is None]
        is_due = published > 0 and time.monotonic() >= self._next_at
        if not living or (len(living) == 1 and is_due):
            self._launch(_LATER_SECONDS if self._runs else _FIRST_SECONDS)

    def stop(self) -> None:
        """Ends them in order: what was read is published, then the runs succeed."""
        for run in self._runs:
            if run.poll() is None:
                run.terminate()
        for run in self._runs:
            try:
                run.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()

    def _launch(self, seconds: float) -> None:
        with self._log(len(self._runs)).open("wb") as log:
            run = subprocess.Popen(
                bound(
                    [sys.executable, "-m", "dagster", "job", "execute", *_JOB],
                    signal.SIGTERM,
                ),
                env=environment(self._settings, self._home, seconds),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for the demo, which then ends its sessions in order.
                start_new_session=True,
            )
        self._runs.append(run)
        self._next_at = time.monotonic() + seconds

    def _log(self, number: int) -> Path:
        return self._home / f"session-{number + 1}.log"

    def _last_words(self, number: int) -> str:
        lines = [line.strip() for line in self._log(number).read_text(errors="replace").splitlines()]
        for sign in ("Failure: ", "Error: ", ""):
            told = [line for line in lines if line and sign in line]
            if told:
                return told[-1]
        return "it logged nothing"
