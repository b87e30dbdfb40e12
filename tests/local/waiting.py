"""Wait for a condition, with a deadline, instead of for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import patience

PATIENCE_SECONDS = 120.0


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Return when the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
