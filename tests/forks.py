"""Python programs in processes that are forked from one which has imported the package.

A new interpreter spends half a second on imports, and a suite starts a thousand.

Invariants:
- A process has the environment, streams, working directory and arguments that a new interpreter would have,
  and is a child of the process that asked for it: `Popen` and `run` do what subprocess's do.
- A process is killed when the one that asked for it ends, however that ends: a run of tests that was killed
  leaves nothing behind. The process that forks ends then, too. A process of pytest-xdist notices that end,
  and ends what its test has started.
- No program runs in the process from which others are forked: it has imported modules, and has one thread.
- A program ends as an interpreter ends: it waits for threads, calls what is registered for the end and
  flushes. Only its objects are not freed one by one, which takes longer than most programs.
- Modules that draw something for their process when they are imported (`_OWN`) are imported by each.
- What an interpreter reads at its start (PYTHON…, LC_…, LANG) is a reason for a new one, and other programs
  are started in the same way. Where the system is not Linux, subprocess starts them all.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, AnyStr, Final

from tests.mutants import patch, watch

# What most programs of the suite need.
_MODULES: Final = (
    *("outbox_pipelines.cli.main", "outbox_pipelines.relay.worker"),
    "outbox_pipelines.quality.outbox_measurements",
    *(
        "outbox_pipelines.relay.worker",
        "outbox_pipelines.relay.append_only",
        "outbox_pipelines.existing.kind",
        "outbox_pipelines.existing.table_worker",
    ),
    *("outbox_pipelines.relay.shared", "outbox_pipelines.relay.parking.notify", "outbox_pipelines.consumer"),
    *(
        "tests.history.standstill",
        "tests.history.tapes",
        "tests.model.relay.recorder",
        "tests.consumer.place",
    ),
)
_OWN: Final = ("outbox_pipelines.relay.service",)
_LARGEST: Final = 1 << 17
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36
_LOOK_SECONDS: Final = 1.0
_FIXED: Final = ("PYTHON", "LC_", "LANG", "TZ", "LD_")


class Popen(subprocess.Popen[AnyStr]):
    """subprocess's, without a wait for imports if a command begins with this interpreter and -m or -c."""

    def __init__(self, args: Sequence[str | Path], *, env: Mapping[str, str], **given: Any) -> None:
        super().__init__(args, env=env, **given)

    def _forker(self) -> Forker:
        return Forker.one()

    def _is_bound(self) -> bool:
        """Return whether the process is killed when this one ends."""
        return True

    # The one place at which subprocess starts a program.
    def _execute_child(self, args: Sequence[str | Path], *given: Any) -> None:
        directory, environment, pipes, session = given[4], given[5], given[9:15], given[20]
        if sys.platform != "linux":
            super()._execute_child(args, *given)  # type: ignore[misc]
            return
        stdin, stdout, stderr = pipes[0], pipes[3], pipes[5]
        asked = {
            "arguments": [os.fspath(word) for word in args],
            "is_ours": _is_ours(args, environment),
            "environment": dict(environment),
            "directory": directory and os.fspath(directory),
            "session": session,
            "by": os.getpid(),
            "is_bound": self._is_bound(),
        }
        streams = [own if own >= 0 else number for number, own in enumerate((stdin, stdout, stderr))]
        self.pid = self._forker().fork(asked, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    args: Sequence[str], *, timeout: float | None = None, **given: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end, as subprocess.run does."""
    if given.pop("capture_output", False):
        given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process: Popen[Any]
    with Popen(args, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _is_ours(args: Sequence[str | Path], environment: Mapping[str, str]) -> bool:
    return args[0] == sys.executable and args[1] in ("-m", "-c") and _fixed(environment) == _fixed(os.environ)


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_FIXED)}


class Forker:
    """The process that forks, as the process sees it that asks.

    Args:
        program: a module that calls `serve`, and its arguments.
    """

    _one: Forker | None = None

    def __init__(self, *program: str) -> None:
        self._lock = threading.Lock()
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *program, str(other.fileno()), str(os.getpid())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        atexit.register(self.end)

    @classmethod
    def one(cls) -> Forker:
        """The one of this process."""
        if cls._one is None:
            cls._one = cls("tests.forks")
        return cls._one

    def fork(self, asked: Mapping[str, object], streams: Sequence[int]) -> int:
        """Return the pid of a new child of this process."""
        message = json.dumps(asked).encode()
        assert len(message) < _LARGEST
        with self._lock, _subreaper():
            socket.send_fds(self._connection, [message], streams)
            return int(self._connection.recv(100))

    def end(self) -> None:
        """End the process that forks; those that were forked go on."""
        self._connection.close()
        self._process.wait()


@contextmanager
def _subreaper() -> Iterator[None]:
    """While this holds, a process whose parent ends becomes a child of this one."""
    _control(_SET_SUBREAPER, 1)
    try:
        yield
    finally:
        _control(_SET_SUBREAPER, 0)


def _control(what: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end_with(parent: int) -> None:
    """Let this process, a child of that one, be killed when that one ends."""
    _control(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _next(connection: socket.socket, by: int) -> Mapping[str, Any] | None:
    """Fork for each request; return in each child with its own, and in the parent, with None, at the end.

    Args:
        by: the process that asks.
    """
    while True:
        # A child of that process may have a copy of its end of the connection.
        while not select.select([connection], [], [], _LOOK_SECONDS)[0]:
            if os.getppid() != by:
                return None
        message, streams, *_ = socket.recv_fds(connection, _LARGEST, 3)
        if not message:
            return None
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            os.close(reader)
            if child := os.fork():
                os.write(writer, str(child).encode())
                # Now the child belongs to the process that asked.
                os._exit(0)
            os.close(writer)
            _take(streams)
            connection.close()
            asked: Mapping[str, Any] = json.loads(message)
            # The death signal is of the parent at that time.
            while os.getppid() == between:
                os.sched_yield()
            if asked["is_bound"]:
                end_with(asked["by"])
            return asked
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            child_pid = answer.read(20)
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)
        connection.send(child_pid)


def _take(streams: Sequence[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def _program(asked: Mapping[str, Any]) -> None:
    """Become the program."""
    if asked["session"]:
        os.setsid()
    if asked["directory"]:
        os.chdir(asked["directory"])
    if not asked["is_ours"]:
        # As subprocess does: Python ignores them, and programs inherit what is ignored.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(asked["arguments"][0], asked["arguments"], asked["environment"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    _, kind, program, *words = asked["arguments"]
    if kind == "-m":
        sys.argv = [program, *words]
        # Imported by another one: what runs has not been imported, and Python would warn.
        for name in (program, f"{program}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words]
        names = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(program, "<string>", "exec"), names)


def _end(code: int) -> None:
    """End as an interpreter does, without freeing its objects: that copies the memory all processes share."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        # Reported by the interpreter.
        sys.exit(code)
    os._exit(code & 0xFF)


def serve(fd: str, by: str) -> None:
    """Fork for each request of the process `by` on this socket until it ends; each child is a program."""
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    if (asked := _next(connection, int(by))) is not None:
        try:
            _program(asked)
        except SystemExit as ended:
            # A text is printed by the interpreter.
            if not isinstance(ended.code, int | None):
                raise
            _end(ended.code or 0)
        _end(0)


def _main() -> None:
    for name in _MODULES:
        __import__(name)
    if patch.VARIABLE in os.environ:
        patch.apply(*json.loads(os.environ[patch.VARIABLE]))
    if watch.VARIABLE in os.environ:
        watch.watch_into(os.environ[watch.VARIABLE])
    assert not sys.modules.keys() & set(_OWN)
    # Children share the memory of what was imported as long as no collection touches it.
    gc.collect()
    gc.freeze()
    serve(*sys.argv[1:])


if __name__ == "__main__":
    _main()
