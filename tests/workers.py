"""pytest-xdist's processes, forked from one that has collected the tests.

Each of them would import the packages and compile the tests: 7 seconds of a processor, 20 in a new clone.

Invariants:
- A forked process collects the tests itself, from imported modules: pytest-xdist sees no difference.
- The process from which others are forked runs no test, starts no server and ends with the run.
- Where the system is not Linux, or coverage is measured, which begins with an interpreter, each process is a
  new interpreter.
- A module of tests draws nothing for its process when it is imported.
- Of a process that crashed, the report says by which signal, and what each of its threads did.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_base, gateway_io

from tests import forks


def can_be_forked() -> bool:
    """Return whether processes of this run can be forked."""
    return sys.platform == "linux" and "coverage" not in sys.modules


@contextmanager
def forked(arguments: Sequence[str | os.PathLike[str]]) -> Iterator[None]:
    """Let execnet fork its processes for the length of the block.

    Args:
        arguments: of this run of pytest.
    """
    forker = forks.Forker("tests.workers", *(os.fspath(word) for word in arguments))

    class Popen(forks.Popen[bytes]):
        def _forker(self) -> forks.Forker:
            return forker

        def _is_bound(self) -> bool:
            # It notices the end itself, and ends what its test has started.
            return False

    def start(
        self: gateway_io.Popen2IOMaster, args: Sequence[str], execmodel: gateway_base.ExecModel
    ) -> None:
        # The streams of an interpreter are unbuffered by -u; execnet opens its own.
        words = [word for word in args if word != "-u"]
        self.popen = Popen(words, env=os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_io.Popen2IOMaster, "__init__", start)
        try:
            yield
        finally:
            forker.end()


def note_crashes(given: Mapping[str, str]) -> None:
    """Write the stack of each thread to a file if this process crashes; `given` is pytest-xdist's."""
    faulthandler.enable(_crash_file(given).open("w"))


def crash(worker: Any) -> str:
    """Return how pytest-xdist's `worker` ended, and its threads' stacks where it could still write them."""
    path = _crash_file(worker.workerinput)
    stacks = path.read_text(errors="replace") if path.exists() else ""
    path.unlink(missing_ok=True)
    # Not before: its end may be seen before its exit code is.
    code = worker.gateway._io.popen.wait(60)
    return f"exit code {code}\n{stacks or 'it wrote no stacks'}"


def _crash_file(given: Mapping[str, str]) -> Path:
    return Path(tempfile.gettempdir(), f"outbox-tests-{given['testrunuid']}-{given['workerid']}")


def _main(arguments: Sequence[str], *asker: str) -> None:
    printed = os.open(os.devnull, os.O_WRONLY)
    os.dup2(printed, 1)
    # Its errors are reported by the processes, which collect again.
    pytest.main([*arguments, "--collect-only", "-n", "0"])
    # Ctrl-C ends the process that asks, and that one's end ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks.serve(*asker)
    # Without freeing its objects.
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1:-2], *sys.argv[-2:])
