"""The detached process that holds PostgreSQL and Kafka for all users of a local stack; starts what they want.

Invariants:
- It holds the supervisor's lock from before its first instruction (inherited) to its last: there is one.
- A server that dies is started again on its port and data. One that does not start ends the supervisor, and
  `state.json` says why.
- It stops on request, or when the lease had no owner for the grace period; in that case it keeps the lease
  until it has ended, so that no client finds a stack that is stopping.
- Servers are launched by the main thread (see `server`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import lease, postgres
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.local.server import Server, free_port
from outbox_pipelines.local.stack_state import KAFKA, KEEP, POSTGRES, STOP, Home, Plan, State

STARTING_SECONDS = 0.02
IDLE_SECONDS = 0.1


class _Held:
    """A server that is starting or running."""

    def __init__(self, home: Home, name: str, plan: Plan, workers: ThreadPoolExecutor) -> None:
        self._home = home
        self._name = name
        self._plan = plan
        self._workers = workers
        self._prepared: Future[Server] | None = None
        self._launched = False
        self.server: Server | None = None
        self.ready = False

    def step(self) -> None:
        """Bring it one step further, without waiting."""
        if self.ready:
            self.ready = self._launched = self.server is not None and self.server.running()
        elif self._prepared is None:
            self._prepared = self._workers.submit(self._prepare)
        elif self._prepared.done():
            self.server = self._prepared.result()
            if self._launched:
                self.ready = self.server.ready()
            else:
                self.server.launch()
                self._launched = True

    def _prepare(self) -> Server:
        server = self._make()
        server.prepare()
        return server

    def _make(self) -> Server:
        # The port of last time, so that what a person noted down stays true.
        note = self._home.path / f"{self._name}.port"
        port = free_port(int(note.read_text()) if note.exists() else None)
        note.write_text(str(port))
        if self._name == KAFKA:
            return Kafka(self._home.path / KAFKA, jar_cache=Path(self._plan.jars), port=port)
        programs = postgres.find_programs(Path(self._plan.postgres) if self._plan.postgres else None)
        directory = self._home.path / f"{POSTGRES}-{postgres.major_version(programs)}"
        return Postgres(directory, bin_dir=programs, port=port)


def supervise(plan: Plan) -> str:
    """Hold the stack until it is to end; returns why it failed, or nothing."""
    home = Home(Path(plan.directory))
    workers = ThreadPoolExecutor()
    held = {name: _Held(home, name, plan, workers) for name in (POSTGRES, KAFKA)}
    published = State()
    end = _EndSignal()
    unused_since: float | None = None
    try:
        while not (end.came or home.asked(STOP)):
            wanted = [held[name] for name in held if home.asked(name) or held[name].server]
            for server in wanted:
                server.step()
            state = _state(held)
            if state != published:
                home.write(state)
                published = state
            alone = lease.try_lock(home.lease)
            if alone is None or home.asked(KEEP):
                unused_since = None
            elif unused_since is None:
                unused_since = time.monotonic()
            elif time.monotonic() - unused_since > plan.grace_seconds:
                return ""
            if alone is not None:
                os.close(alone)
            time.sleep(IDLE_SECONDS if all(server.ready for server in wanted) else STARTING_SECONDS)
    except SetupError as error:
        return str(error)
    except FileNotFoundError:
        if home.lease.exists():
            raise
        # The directory was removed: no client can find this stack any more.
    finally:
        # Waiting clients must not use servers that are about to stop.
        if home.lease.exists():
            home.write(State())
        for one in held.values():
            if one.server is not None:
                one.server.stop()
    return ""


class _EndSignal:
    """Remembers that the machine, or a person, asked this process to end."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def _state(held: dict[str, _Held]) -> State:
    database, broker = held[POSTGRES], held[KAFKA]
    return State(
        dsn=database.server.dsn if database.ready and isinstance(database.server, Postgres) else "",
        kafka=broker.server.bootstrap if broker.ready and isinstance(broker.server, Kafka) else "",
    )


def _main() -> None:
    # Its parent goes on at once, and no zombie is left to it.
    if os.fork():
        os._exit(0)
    plan = Plan(**json.loads(sys.argv[1]))
    try:
        problem = supervise(plan)
    except Exception as error:  # noqa: BLE001 - reported to the waiting clients
        traceback.print_exc()
        problem = f"the local stack failed: {type(error).__name__}: {error}"
    home = Home(Path(plan.directory))
    if home.lease.exists():
        home.write(State(error=problem))
    # Threads may still prepare a server that is no longer needed; their programs end with this process.
    os._exit(1 if problem else 0)


if __name__ == "__main__":
    _main()
