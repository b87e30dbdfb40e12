"""What this process has used so far (Linux)."""

from __future__ import annotations

import time
from pathlib import Path


def peak() -> float:
    """Return the largest resident memory that it has had, in MB."""
    # Not ru_maxrss: that of the process which has started this one counts in it.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def cpu() -> float:
    """Return the seconds of CPU of all its threads, its start included."""
    return time.process_time()
