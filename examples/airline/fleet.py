"""`make fleet`: three airlines in three databases, one relay process, one Dagster, until Ctrl-C.

Invariants:
- The relay process is started again when it is killed, as a supervisor of services would: kill it and watch.
- Everything is new at the start and gone at the end: processes, DAGSTER_HOME, databases, topics.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from examples.airline.desks import Desks
from examples.airline.flights import IN_A_YEAR, Operation, operations
from examples.airline.pages import HOST, require_free, serving
from examples.airline.place import database, prepared
from examples.airline.report import Progress, say
from examples.airline.run import relayed
from examples.airline.sessions import base_environment, make_home
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import stack
from outbox_pipelines.local.server import bound
from outbox_pipelines.settings import Settings, load_settings

AIRLINES: Final = {"jetblue": "B6", "delta": "DL", "united": "UA"}
SCHEMA: Final = "outbox_fleet"

_PER_SECOND: Final = 3.0
_TICK_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Airline:
    """One airline at work."""

    name: str
    settings: Settings
    desks: Desks
    connection: Connection

    def line(self) -> str:
        """Return how far it is."""
        return f"{self.name} {self.desks.events:,} written, {relayed(self.connection).events:,} published"


def run(port: int, seed: int) -> int:
    """Show the fleet until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        SetupError: the environment must be corrected first, such as a port in use.
    """
    require_free(port)
    given = load_settings()
    say("Starting PostgreSQL and Kafka …" if not (given.dsn and given.kafka) else "Connecting …")
    with ExitStack() as ends:
        servers = ends.enter_context(stack(given, say))
        # Dagster may still be writing when it is ended.
        directory = tempfile.TemporaryDirectory(prefix="outbox-fleet-", ignore_cleanup_errors=True)
        home = Path(ends.enter_context(directory))
        make_home(home)
        of_servers = given.model_copy(update={"dsn": servers.dsn, "kafka": servers.kafka})
        airlines = [ends.enter_context(_airline(of_servers, name, seed)) for name in AIRLINES]
        environment = _environment(airlines, home)
        relay = ends.enter_context(_relaying(environment, home))
        say("Starting Dagster …")
        with serving(environment, home, port) as pages:
            pages.wait_until_ready()
            say(_welcome(port, relay.pid, home))
            _work(airlines, relay, pages.require_alive)
            say("Ending Dagster …")
    return 0


class Relay:
    """The relay process, started again when it ends."""

    def __init__(self, environment: Mapping[str, str], home: Path) -> None:
        self._environment = environment
        self._home = home
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process id, to be killed."""
        return self._process.pid

    def tend(self) -> bool:
        """Start the process again if it was killed; return whether it was.

        Raises:
            SetupError: it has ended by itself.
        """
        code = self._process.poll()
        if code is None:
            return False
        if code >= 0:
            lines = (self._home / "relay.log").read_text(errors="replace").strip().splitlines()
            raise SetupError(f"`outbox relay --all` has ended: {lines[-1] if lines else f'exit code {code}'}")
        self._process = self._start()
        return True

    def stop(self) -> None:
        """End it in order."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._home / "relay.log").open("ab") as log:
            return subprocess.Popen(
                bound([sys.executable, "-m", "outbox_pipelines", "relay", "--all"], signal.SIGTERM),
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextmanager
def _relaying(environment: Mapping[str, str], home: Path) -> Iterator[Relay]:
    relay = Relay(environment, home)
    try:
        yield relay
    finally:
        relay.stop()


@contextmanager
def _airline(servers: Settings, name: str, seed: int) -> Iterator[Airline]:
    """An airline with a database of its own, which is gone at the end."""
    with database(servers.require_dsn(), f"{SCHEMA}_{name}") as dsn:
        own = servers.model_copy(update={"dsn": dsn})
        with (
            prepared(own, SCHEMA, keep=False) as settings,
            connect(settings, name="outbox demo: progress") as connection,
        ):
            flights = _of_carrier(operations(IN_A_YEAR), AIRLINES[name])
            yield Airline(
                name, settings, Desks(settings, flights, seed=seed, per_second=_PER_SECOND), connection
            )


def _of_carrier(stream: Iterator[Operation], carrier: str) -> Iterator[Operation]:
    for operation in stream:
        if operation.flights[0].number.startswith(carrier):
            yield operation


def _environment(airlines: list[Airline], home: Path) -> dict[str, str]:
    """Return the environment of the relay and of Dagster, and write the `outbox.toml` that it names."""
    file = home / "outbox.toml"
    lines = [
        "[outbox]",
        f"kafka = {json.dumps(airlines[0].settings.require_kafka())}",
        f'schema = "{SCHEMA}"',
        "[days]",
        'archive = "archive/{outbox}"',
    ]
    for airline in airlines:
        # The directory is this user's alone.
        (home / f"{airline.name}.dsn").write_text(airline.settings.require_dsn())
        lines += [
            f"[outboxes.{airline.name}]",
            f'dsn = {{ file = "{airline.name}.dsn" }}',
            f'topics.topic = "{airline.settings.topic}"',
        ]
    file.write_text("\n".join(lines) + "\n")
    return {**base_environment(home), "OUTBOX_CONFIG": str(file)}


def _work(airlines: list[Airline], relay: Relay, require_alive: Callable[[], None]) -> None:
    """Write, show and supervise until the end."""
    progress = Progress()
    for airline in airlines:
        airline.desks.start()
    try:
        while all(airline.desks.working() for airline in airlines):
            require_alive()
            if relay.tend():
                progress.end()
                say(f"The relay process was killed, and started again as {relay.pid}.")
            if progress.due():
                progress.show(" | ".join(airline.line() for airline in airlines))
            time.sleep(_TICK_SECONDS)
    finally:
        for airline in airlines:
            airline.desks.stop()
        progress.end()


def _welcome(port: int, pid: int, home: Path) -> str:
    address = f"http://{HOST}:{port}"
    return f"""
Dagster: {address}
  all outboxes, a row for each   {address}/assets/outboxes
  one of them                    {address}/locations/outbox/asset-groups/outbox_delta/lineage
One process relays all three. Kill it, and watch it come back:
  kill -9 {pid}
  OUTBOX_CONFIG={home}/outbox.toml outbox status --all
Each airline has {_PER_SECOND:.0f} operations a second. Ctrl-C ends everything.
"""
