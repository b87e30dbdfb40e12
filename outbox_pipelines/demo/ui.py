"""`make ui`: Dagster's pages on a relay at work, with flights coming in until Ctrl-C.

Invariants:
- Everything is new at the start and gone at the end: processes, DAGSTER_HOME, schema, topics.
- `dagster dev` has a process session of its own: it ends on our signal and not on the terminal's, and what it
  leaves in that session is found and ended too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from outbox_pipelines.database import connect
from outbox_pipelines.demo import report
from outbox_pipelines.demo.desks import Desks
from outbox_pipelines.demo.flights import IN_A_YEAR, operations
from outbox_pipelines.demo.place import prepared
from outbox_pipelines.demo.report import Progress, say
from outbox_pipelines.demo.run import relayed
from outbox_pipelines.demo.sessions import environment, make_home
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import stack
from outbox_pipelines.local.server import bound
from outbox_pipelines.settings import load_settings

SCHEMA: Final = "outbox_ui"

_HOST: Final = "127.0.0.1"
_PER_SECOND: Final = 5.0
# Short, so that who watches sees a hand-over.
_SESSION_SECONDS: Final = 120.0
_TICK_SECONDS: Final = 0.2
_START_SECONDS: Final = 120.0
# `dagster dev` gives each of its services 15 s.
_STOP_SECONDS: Final = 40.0


def run(port: int, seed: int) -> int:
    """Shows the relay until Ctrl-C or SIGTERM; the exit code.

    Raises:
        SetupError: something outside must be mended first, such as a port in use.
    """
    _require_free(port)
    given = load_settings()
    say("Starting PostgreSQL and Kafka …" if not (given.dsn and given.kafka) else "Connecting …")
    with (
        stack(given, say) as servers,
        # Dagster may still be writing when it is ended.
        tempfile.TemporaryDirectory(prefix="outbox-ui-", ignore_cleanup_errors=True) as home,
        prepared(
            given.model_copy(update={"dsn": servers.dsn, "kafka": servers.kafka}), SCHEMA, keep=False
        ) as settings,
        connect(settings, name="outbox demo: progress") as connection,
    ):
        say("Starting Dagster …")
        make_home(Path(home))
        desks = Desks(settings, operations(IN_A_YEAR), seed=seed, per_second=_PER_SECOND)
        progress = Progress()
        with _dagster(environment(settings, Path(home), _SESSION_SECONDS), Path(home), port) as dagster:
            _wait_until_ready(dagster, Path(home), port)
            say(_welcome(port))
            desks.start()
            try:
                while desks.working():
                    _require_alive(dagster, Path(home))
                    if progress.due():
                        progress.show(report.progress_line(desks, relayed(connection)))
                    time.sleep(_TICK_SECONDS)
            finally:
                desks.stop()
                progress.end()
                say("Ending Dagster …")
    return 0


def _welcome(port: int) -> str:
    address = f"http://{_HOST}:{port}"
    return f"""
Dagster: {address}
  the outbox and what is made of it   {address}/locations/outbox/asset-groups/outbox/lineage
  what the relay publishes, as plots  {address}/assets/outbox/relay
  its sessions, {_SESSION_SECONDS:.0f} s each           {address}/runs
{_PER_SECOND:.0f} flights a second are planned, leave, arrive or are cancelled. Ctrl-C ends everything.
"""


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        # As servers do: a connection that was closed lately does not block a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            raise SetupError(f"port {port} is in use: choose another with --port") from None


@contextmanager
def _dagster(variables: dict[str, str], home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`dagster dev`, and the end of everything that comes of it."""
    with (home / "dagster.log").open("wb") as log:
        command = [sys.executable, "-m", "dagster", "dev", "--host", _HOST, "--port", str(port)]
        dagster = subprocess.Popen(
            bound([*command, *_code_location()], signal.SIGTERM),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield dagster
    finally:
        dagster.terminate()
        with suppress(subprocess.TimeoutExpired):
            dagster.wait(_STOP_SECONDS)
        _end_session(dagster)


def _code_location() -> list[str]:
    # In a checkout the file that `dagster dev` would find by itself; an installed package has none.
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


def _wait_until_ready(dagster: subprocess.Popen[bytes], home: Path, port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        _require_alive(dagster, home)
        try:
            with urllib.request.urlopen(f"http://{_HOST}:{port}/server_info", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise SetupError(f"Dagster does not answer on port {port}: {_last_words(home)}") from None
            time.sleep(_TICK_SECONDS)


def _require_alive(dagster: subprocess.Popen[bytes], home: Path) -> None:
    if dagster.poll() is not None:
        raise SetupError(f"`dagster dev` has ended: {_last_words(home)}")


def _last_words(home: Path) -> str:
    lines = (home / "dagster.log").read_text(errors="replace").split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-3:])
