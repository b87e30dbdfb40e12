"""Run a command in one's own place: its signals go to it, its exit code comes back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

# A terminal sends these to the command as well as to us.
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
FROM_OTHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run to the end; the exit code as a shell gives it: 128 + n for a command that signal n ended.

    Raises:
        OSError: the command cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number in FROM_TERMINAL and _terminal_is_ours():
            return
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (*FROM_TERMINAL, *FROM_OTHERS)}
    try:
        child = subprocess.Popen(command, env=environment)
        # A signal may have arrived before the child process was known.
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _terminal_is_ours() -> bool:
    """Return whether keys such as Ctrl-C reach our process group, and with it the command."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
