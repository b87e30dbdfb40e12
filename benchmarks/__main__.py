"""`python -m benchmarks [NAME …]`: all of them, or those named."""

from __future__ import annotations

import platform
import sys

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
    if unknown := set(names) - set(_PARTS):
        print(f"unknown benchmark {min(unknown)!r}: choose from {', '.join(_PARTS)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with servers() as settings:
        for name in names or _PARTS:
            print(f"measuring {name} …", file=sys.stderr)
            rows += _PARTS[name](settings)
    print(f"\n{platform.machine()}, {platform.python_implementation()} {platform.python_version()}\n")
    print(render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
