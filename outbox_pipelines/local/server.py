"""One server process on the loopback: started, stopped, killed, and started again on its port and data.

Invariants:
- It ends with the process that started it, also when that is killed (Linux). The kernel ties this to the
  *thread*: `launch` belongs in a thread that lives as long as the server, as the main thread does.
- Only the process that was started here is ever signalled.
- The server and all its children inherit a lock; while one of them lives, none is started on the same data.
- Ready means that it answered in its own protocol.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import lease

POLL_SECONDS = 0.02
# A machine that has just started reads its programs from the disk: a minute was not enough for five at once.
START_SECONDS = 120.0
STOP_SECONDS = 20.0

Command = Sequence[str | Path]
STAY = (-1, -1)
"""No change of user and group."""


class Server(ABC):
    """A server whose files lie in one directory. As a context manager it runs for the length of the block.

    Example:
        >>> with Postgres(tmp_path, {"fsync": "on"}) as server:
        ...     connection = psycopg.connect(server.dsn)
        ...     server.kill()
        ...     server.start()

    Args:
        directory: where data and the log lie; created where missing.
        port: on 127.0.0.1; a free one is chosen where none is given, and kept from then on.
    """

    name: str
    stop_signal: signal.Signals
    death_signal: signal.Signals
    stop_seconds = STOP_SECONDS
    """How long it may take to end in good order; then it is killed."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        # The servers run with other working directories than the caller.
        self.directory = directory.expanduser().absolute()
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._deadline = 0.0

    @property
    def log(self) -> Path:
        """The file with everything the server printed."""
        return self.directory / f"{self.name}.log"

    @abstractmethod
    def prepare(self) -> None:
        """Everything before the start that takes time and makes no lasting process; any thread may do it.

        Raises:
            SetupError: something is missing on this machine.
        """

    @abstractmethod
    def launch(self) -> None:
        """Start the prepared server and return at once."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server speaks its protocol on its port, now."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until ready; the same port and data as before.

        Raises:
            SetupError: it did not start; the message has the last lines of its log.
        """
        self.prepare()
        self.launch()
        self.wait()

    def wait(self) -> None:
        """Return when the launched server is ready; errors as in `ready`."""
        while not self.ready():
            time.sleep(POLL_SECONDS)

    def ready(self) -> bool:
        """Return whether the launched server answers already.

        Raises:
            SetupError: it ended, or has not answered for two minutes; the message has the end of its log.
        """
        if self.running() and self.answers():
            return True
        if self.running() and time.monotonic() < self._deadline:
            return False
        self.kill()
        raise SetupError(f"{self.name} did not start: {self.last_words()} (log: {self.log})")

    def running(self) -> bool:
        """Return whether the process lives; it may not answer yet."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End in good order."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """End at once, as a crash would: kill -9."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop answering, with every connection open, until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._signal(signal.SIGCONT)

    def last_words(self) -> str:
        """The end of what the server printed since its last start, on one line."""
        try:
            text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        except FileNotFoundError:
            text = ""
        return last_lines(text)

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """The lock of this data, for a child to inherit; waits for what ran on it before to be gone."""
        # After a kill -9 the children of a server, or the server of a killed process, last a little longer.
        path = self.directory / f"{self.name}.lock"
        with lease.locked(path, seconds=STOP_SECONDS) as lock:
            if lock is None:
                raise SetupError(f"another {self.name} still runs on {self.directory}: end it first")
            yield lock

    def _spawn(
        self,
        command: Command,
        lock: int,
        user: tuple[int, int] = STAY,
        pass_fds: Sequence[int] = (),
    ) -> None:
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._deadline = time.monotonic() + START_SECONDS
            self._process = subprocess.Popen(
                bound(command, self.death_signal, user),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=(lock, *pass_fds),
                # Ctrl-C in a terminal is for the command that uses the server.
                start_new_session=True,
            )

    def _run(
        self,
        command: Command,
        lock: int,
        user: tuple[int, int] = STAY,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Run a command that prepares the data, to its end."""
        done = subprocess.run(
            bound(command, signal.SIGKILL, user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            pass_fds=(lock, *pass_fds),
            start_new_session=True,
        )
        if done.returncode:
            problem = last_lines(done.stdout)
            raise SetupError(f"{self.name}: the data in {self.directory} could not be created: {problem}")

    def _signal(self, how: signal.Signals) -> None:
        if self._process is None:
            raise SetupError(f"{self.name} is not running")
        self._process.send_signal(how)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(how)
            # A frozen one would only end when it is thawed.
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def last_lines(text: str, count: int = 4) -> str:
    """The end of a log, on one line."""
    # The frames of a Java trace say nothing to the reader; what stands above them does.
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    return " | ".join(lines[-count:]) or "nothing was logged"


def bound(command: Command, death_signal: signal.Signals, user: tuple[int, int] = STAY) -> list[str]:
    """The command line of a program that ends with the calling thread, as that user."""
    launch = Path(__file__).with_name("launch.py")
    identity = (*user, int(death_signal), os.getpid())
    return [str(part) for part in (sys.executable, "-I", "-S", launch, *identity, *command)]


_held: dict[int, socket.socket] = {}


def free_port(wished: int | None = None) -> int:
    """Return a port of 127.0.0.1 that is neither in use nor reserved: the wished one, if it is not in use.

    It is reserved until this process ends, so that a server that is briefly down finds it free again, and
    two servers that start at the same time never get the same one.
    """
    # Below the range that systems take for outgoing connections.
    candidates = [wished] if wished else []
    candidates += [port for port in random.sample(range(20_000, 30_000), 100) if port not in _held]
    for port in candidates:
        probe = socket.socket()
        if port == wished:
            # As servers do: a connection of the past in TIME_WAIT does not block a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.close()
            continue
        _hold(port, probe)
        return port
    raise SetupError("no free port between 20000 and 30000 on 127.0.0.1 for the local stack")


def _hold(port: int, probe: socket.socket) -> None:
    """Keep the port from other calls, here and in other processes, and not from the server it is for."""
    _held[port] = probe
    if sys.platform == "linux":
        # A socket that is bound and does not listen is no obstacle to servers, which say SO_REUSEADDR; it is
        # one to a probe that does not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        probe.close()
