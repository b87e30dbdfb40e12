"""The second judge: Porcupine, in a Go program that knows only the saved history (tests/interop/porcupine).

`python -m tests.interop.build` builds it. Without it histories have one judge.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from outbox_pipelines.settings import load_settings
from tests.history.record import History, save
from tests.interop import build


def check(path: Path) -> list[str]:
    """Return what it prints about a saved history: a summary, and a line for each anomaly.

    Returns:
        Nothing if the program is not built.

    Raises:
        CalledProcessError: the file cannot be read.
    """
    program = build.place(load_settings(), build.PORCUPINE)
    if not program.is_file():
        return []
    done = subprocess.run([program, path], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
    return done.stdout.splitlines()


def judge(history: History) -> list[str]:
    """The same of one in memory."""
    with tempfile.TemporaryDirectory(prefix="history-") as directory:
        save(history, path := Path(directory) / "history.jsonl")
        return check(path)
