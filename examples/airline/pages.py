"""`dagster dev` for as long as a block, and the end of everything that comes of it.

Invariants:
- It has a process session of its own: it ends on our signal, not on the terminal's, and what it leaves there
  is found and ended too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.server import bound

HOST: Final = "127.0.0.1"

_TICK_SECONDS: Final = 0.2
# A machine that also does other work needs minutes.
_START_SECONDS: Final = 900.0
_REPORT_SECONDS: Final = 30.0
# `dagster dev` gives each of its services 15 s.
_STOP_SECONDS: Final = 40.0


class Pages:
    """Dagster's pages, served."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, port: int) -> None:
        self._process = process
        self._home = home
        self.address = f"http://{HOST}:{port}"

    def require_alive(self) -> None:
        """Raises a `SetupError` with Dagster's last words if it has ended."""
        if self._process.poll() is not None:
            raise SetupError(f"`dagster dev` has ended: {self._last_words()}")

    def wait_until_ready(self) -> None:
        """Waits until the pages answer, and prints twice a minute that they do not yet.

        Raises:
            SetupError: `dagster dev` has ended, or does not answer for a quarter of an hour.
        """
        started = time.monotonic()
        deadline, report_at = started + _START_SECONDS, started + _REPORT_SECONDS
        while True:
            self.require_alive()
            try:
                with urllib.request.urlopen(f"{self.address}/server_info", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"Dagster does not answer at {self.address}: {self._last_words()}"
                    ) from None
                if time.monotonic() > report_at:
                    seconds = time.monotonic() - started
                    print(
                        f"Dagster is still starting, after {seconds:.0f} s: {self._last_words()}", flush=True
                    )
                    report_at += _REPORT_SECONDS
                time.sleep(_TICK_SECONDS)

    def _last_words(self) -> str:
        lines = (self._home / "dagster.log").read_text(errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-3:])


def require_free(port: int) -> None:
    """Raise a `SetupError` if a port is in use."""
    with socket.socket() as probe:
        # As servers do: a connection that was closed lately does not block a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise SetupError(f"port {port} is in use: choose another with --port") from None


@contextmanager
def serving(variables: Mapping[str, str], home: Path, port: int) -> Iterator[Pages]:
    """Starts it; the log is `dagster.log` in `home`."""
    with (home / "dagster.log").open("wb") as log:
        command = [sys.executable, "-m", "dagster", "dev", "--host", HOST, "--port", str(port)]
        dagster = subprocess.Popen(
            bound([*command, *_code_location()], signal.SIGTERM),
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Pages(dagster, home, port)
    finally:
        dagster.terminate()
        with suppress(subprocess.TimeoutExpired):
            dagster.wait(_STOP_SECONDS)
        _end_session(dagster)


def _code_location() -> list[str]:
    # In a checkout the file that `dagster dev` would find automatically; an installed package has none.
    workspace = Path(__file__).parents[2] / "workspace.yaml"
    if workspace.is_file():
        return ["--workspace", str(workspace)]
    return ["--module-name", "outbox_pipelines.definitions"]


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a process session, the harder the longer it takes."""
    for number, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + seconds
        for pid in _members(leader.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _members(leader.pid):
            if time.monotonic() > deadline:
                break
            time.sleep(_TICK_SECONDS)
    leader.wait()


def _members(session: int) -> list[int]:
    """The living processes of a session."""
    members = []
    for pid, state in _processes():
        with suppress(ProcessLookupError, PermissionError):
            if not state.startswith("Z") and os.getsid(pid) == session:
                members.append(pid)
    return members


def _processes() -> Iterator[tuple[int, str]]:
    """Every process with its state."""
    if sys.platform == "linux":
        # Small images have no `ps`.
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                yield int(stat.parent.name), stat.read_text().rpartition(") ")[2]
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,stat="], capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            pid, state = line.split()
            yield int(pid), state
