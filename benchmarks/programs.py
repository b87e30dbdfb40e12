"""Runs the programs that are measured, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from benchmarks.relay import Drain
from benchmarks.servers import rewind
from outbox_pipelines.core.secret import Secret
from outbox_pipelines.settings import Settings


def environment(settings: Settings) -> dict[str, str]:
    """The settings, for a child."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    return inherited | {
        "OUTBOX_DSN": settings.dsn,
        "OUTBOX_KAFKA": settings.kafka,
        "OUTBOX_TOPIC": settings.topic,
        "OUTBOX_DELIVERY": settings.delivery,
        "OUTBOX_MAX_ATTEMPTS": str(settings.max_attempts),
        "OUTBOX_RETRY_SECONDS": str(settings.retry_seconds),
        **_format(settings),
        **({"OUTBOX_TABLE": json.dumps(settings.table)} if settings.table else {}),
    }


def _format(settings: Settings) -> dict[str, str]:
    if settings.format == "json":
        return {}
    return {
        "OUTBOX_FORMAT": settings.format,
        "OUTBOX_REGISTRY_URL": settings.registry_url,
        "OUTBOX_REGISTRY_FRAMING": settings.registry_framing,
        "OUTBOX_CATALOG_FILE": str(settings.catalog_file),
    }


def _text(argument: object) -> str:
    return argument.reveal() if isinstance(argument, Secret) else str(argument)


def run(settings: Settings, module: str, *arguments: object) -> list[float]:
    """Runs it to its end; the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *map(_text, arguments)],
        env=environment(settings),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(number) for number in done.stdout.split()]


def drain(settings: Settings, *arguments: object) -> Drain:
    """One drain by the relay."""
    return Drain(*run(settings, "relay", *arguments))


def drain_rate(settings: Settings, rounds: int = 3) -> float:
    """Return the median of so many drains of all events, in events a second."""
    rates = []
    for _ in range(rounds):
        rewind(settings)
        rates.append(drain(settings).rate)
    return median(rates)


@contextmanager
def running(settings: Settings, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a Python module beside the measurement."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(_text, arguments)],
        env=environment(settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def cpu_seconds(pid: int) -> float:
    """CPU time of a running process, in seconds (Linux)."""
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a running process, of its children, and of those that have ended, in seconds (Linux)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = 0.0
    for process in (pid, *map(int, children)):
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            found += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found
