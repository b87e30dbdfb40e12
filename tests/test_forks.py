"""A forked process is what a new interpreter would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.conftest import wait_until

_PROGRAM = """
import os, sys
names = sorted(os.environ)
print([sys.argv, os.getcwd(), names, os.environ["MINE"], __name__, os.getppid(), sys.stdin.read()])
print("told", file=sys.stderr)
sys.exit(3)
"""
_WAITS = "import time; print('in', flush=True); time.sleep(100)"


def test_it_has_what_a_new_interpreter_has(tmp_path: Path) -> None:
    """Guards against a test that passes because of what its process was forked from."""
    command = [sys.executable, "-c", _PROGRAM, "a", "b"]
    given: dict[str, Any] = {
        "env": os.environ | {"MINE": "1"},
        "cwd": tmp_path,
        "stdin": subprocess.DEVNULL,
        "text": True,
    }
    made = forks.run(command, capture_output=True, **given)
    apart = subprocess.run(command, capture_output=True, **given)
    assert (made.returncode, made.stdout, made.stderr) == (apart.returncode, apart.stdout, apart.stderr)
    assert str(os.getpid()) in made.stdout


def test_relays_have_names_of_their_own() -> None:
    """Guards against relays that take each other for themselves, and a crash that does not count."""
    program = "from outbox_pipelines.relay import service; print(service._TOKEN)"
    command = [sys.executable, "-c", program]
    tokens = {forks.run(command, env=os.environ, capture_output=True, text=True).stdout for _ in range(3)}
    assert len(tokens) == 3


def test_an_error_ends_it_as_an_interpreter() -> None:
    """Guards against a crash that looks like a success."""
    made = forks.run([sys.executable, "-c", "1 / 0"], env=os.environ, capture_output=True, text=True)
    assert made.returncode == 1
    assert made.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_module_runs_as_if_it_had_not_been_imported() -> None:
    """Guards against a warning of Python before the first line of a command."""
    command = [sys.executable, "-m", "outbox_pipelines", "--help"]
    made = forks.run(command, env=os.environ, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")


def test_another_program(tmp_path: Path) -> None:
    """Guards against a program that does not get what it was given."""
    words = ["sh", "-c", 'echo "$0 $MINE"; pwd; cat; exit 4', "a"]
    given: dict[str, Any] = {"env": os.environ | {"MINE": "1"}, "cwd": tmp_path, "stdin": subprocess.DEVNULL}
    made = forks.run(words, capture_output=True, text=True, **given)
    assert (made.returncode, made.stdout, made.stderr) == (4, f"a 1\n{tmp_path}\n", "")


def test_it_is_killed_by_its_pid() -> None:
    """Guards against a kill that hits another process, or is not seen."""
    process: forks.Popen[str] = forks.Popen(
        [sys.executable, "-c", _WAITS], env=os.environ, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(600) == -signal.SIGKILL


@pytest.mark.extended
def test_all_end_with_the_process_that_asked_for_them() -> None:
    """Guards against relays, other programs and the process that forks that go on after a run was killed."""
    asks = (
        "import os, subprocess, sys, time; from tests import forks;"
        f"made = forks.Popen([sys.executable, '-c', {_WAITS!r}], env=os.environ, stdout=subprocess.PIPE,"
        "text=True); other = forks.Popen(['sleep', '100'], env=os.environ);"
        # Which has a copy of each connection.
        "copy = os.fork();"
        "copy or time.sleep(100);"
        "print(made.stdout.readline().strip(), made.pid, other.pid, forks.Forker.one()._process.pid, copy,"
        "flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", asks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told, *pids, copy = process.stdout.readline().split()
        assert (told, len(pids)) == ("in", 3)
        process.kill()
    try:
        wait_until(lambda: not any(_lives(int(pid)) for pid in pids), what="the end of all three")
    finally:
        os.kill(int(copy), signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
