"""`python -m benchmarks [--busy] [NAME …]`: all or some; --busy: beside a process that burns a core."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from benchmarks import (
    adoption,
    archive,
    archive_queries,
    attached,
    cdc,
    cleaning,
    commits,
    compression,
    consumers,
    drains,
    existing,
    fleet,
    guards,
    health,
    history,
    latency,
    maintenance,
    peers,
    poisoned,
    pruning,
    reconciliation,
    shard_reads,
    shards,
    starts,
    writers,
)
from benchmarks.servers import servers
from benchmarks.table import Row, render

_PARTS = {
    part.__name__.rpartition(".")[2]: part.measure
    for part in (
        drains,
        existing,
        compression,
        peers,
        shards,
        shard_reads,
        poisoned,
        latency,
        cdc,
        commits,
        writers,
        guards,
        consumers,
        starts,
        archive,
        archive_queries,
        maintenance,
        attached,
        health,
        history,
        reconciliation,
        pruning,
        adoption,
        cleaning,
        fleet,
    )
}


def main(names: list[str]) -> int:
    """Measure and print the table. Return 2 for an unknown name."""
    is_busy = "--busy" in names
    names = [name for name in names if name != "--busy"]
    if unknown := set(names) - set(_PARTS):
        print(f"unknown benchmark {min(unknown)!r}: choose from {', '.join(_PARTS)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with servers() as settings, _burning() if is_busy else nullcontext():
        for name in names or _PARTS:
            print(f"measuring {name} …", file=sys.stderr)
            rows += _PARTS[name](settings)
    beside = ", beside a process that burns a core" if is_busy else ""
    print(f"\n{platform.machine()}, {platform.python_implementation()} {platform.python_version()}{beside}\n")
    print(render(rows))
    return 0


@contextmanager
def _burning() -> Iterator[None]:
    """Burn a core while the block runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
