"""The command `outbox` in this process: a new one spends most of a second on imports.

Invariants:
- Arguments, environment, exit code, stdout and stderr are those that a process of its own would have; an
  unexpected error is printed by the hook that the command installs.
- What a command changes in its process is undone when it has ended: variables, handlers of signals, the log.
- What Kafka's C library prints, what a process does after `main`, and deadlines need a process of its own.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from outbox_pipelines.__main__ import main

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOGGERS = ("outbox_pipelines", "outbox_pipelines.librdkafka", "outbox_pipelines.command")


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command to its end with these variables and no others."""
    # Handlers of signals belong to the main thread; variables and streams to the whole process.
    assert threading.current_thread() is threading.main_thread(), "use Outbox.process in a thread"
    stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with _kept(), pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["outbox", *arguments])
        patch.setattr(sys, "stdin", io.StringIO())
        # Only what differs: libpq reads variables in other threads.
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            if os.environ.get(name) != value:
                patch.setenv(name, value)
        code = _code()
    return subprocess.CompletedProcess(["outbox", *arguments], code, _text(stdout), _text(stderr))


def _code() -> int:
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except Exception as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


@contextmanager
def _kept() -> Iterator[None]:
    signals = {number: signal.getsignal(number) for number in _SIGNALS}
    root, hook = logging.getLogger(), sys.excepthook
    handlers = list(root.handlers)
    loggers = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, _LOGGERS)]
    try:
        yield
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        root.handlers[:], sys.excepthook = handlers, hook
        for logger, level, propagate in loggers:
            logger.setLevel(level)
            logger.propagate = propagate


def _text(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()
