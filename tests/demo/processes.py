"""The demo as a process, and everything that comes of it.

Invariants:
- It is started with a variable of its own, which all its descendants inherit: this identifies them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests import forks
from tests.conftest import clean_environment

_DESCENT = "DEMO_OF_TEST"


@dataclass(frozen=True)
class Demo:
    """A running demo."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def output(self) -> str:
        """What it printed until now."""
        return _output(self.directory).read_text()

    def told(self, text: str) -> bool:
        """Whether it printed this; fails when it ended before."""
        if text in self.output:
            return True
        assert self.process.poll() is None, self.output
        return False

    def descendants(self) -> list[str]:
        """The command lines of the living processes that it started, and its own."""
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if os.fsencode(f"{_DESCENT}={self.directory}\0") in environment.read_bytes() + b"\0":
                    found.append((environment.parent / "cmdline").read_bytes().decode().replace("\0", " "))
        return found


@contextmanager
def demo(directory: Path, environment: dict[str, str], *arguments: str) -> Iterator[Demo]:
    """Runs it for the length of the block."""
    with _output(directory).open("wb") as output:
        process: forks.Popen[bytes] = forks.Popen(
            # With an option first, a new interpreter: a forked one would not show _DESCENT.
            [sys.executable, "-u", "-m", "examples.airline", *arguments],
            env=clean_environment() | environment | {"TMPDIR": str(directory), _DESCENT: str(directory)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Demo(process, directory)
    finally:
        process.terminate()
        process.wait(600)


def _output(directory: Path) -> Path:
    # In another directory, so that what is left in this one is left by the demo.
    return directory.with_suffix(".output")
