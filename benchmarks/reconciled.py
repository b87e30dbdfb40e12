"""One reconciliation in a process of its own: ``python -m benchmarks.reconciled DAY CONSUMERS SLICES``.

Prints a `Reconciled`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import tomllib
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks import usage
from outbox_pipelines.core import log
from outbox_pipelines.reconciliation import steps as days
from outbox_pipelines.settings import load_settings


class Reconciled(NamedTuple):
    """What one reconciliation took."""

    events: float
    messages: float
    findings: float
    seconds: float
    cpu: float
    """Seconds of CPU of the process, its start included."""
    memory: float
    """The peak of the process, in MB."""
    disk: float
    """The peak of its directory, in MB."""


def _watch(directory: Path, sizes: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.5):
        size = 0
        for path in directory.rglob("*"):
            try:
                size += path.stat().st_blocks * 512
            except OSError:
                continue
        sizes.append(size)


def main() -> None:
    settings = load_settings(consumers=tomllib.loads(Path(sys.argv[2]).read_text()))
    log.configure(settings)
    sizes, stop = [0], threading.Event()
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        watch = threading.Thread(target=_watch, args=(Path(directory), sizes, stop))
        watch.start()
        report = days.reconcile(
            settings, date.fromisoformat(sys.argv[1]), progress=log.say, slices=int(sys.argv[3])
        )
        stop.set()
        watch.join()
    found = sum(each.count for side in report.sides for each in side.findings)
    print(
        *Reconciled(
            *(report.events, report.messages, found, report.seconds),
            *(usage.cpu(), usage.peak(), max(sizes) / 1e6),
        )
    )


if __name__ == "__main__":
    main()
