"""`python -m benchmarks [--busy] [--quick] [--seconds N] [NAME …]`: all or some.

--busy: beside a process that burns a core. Of `scale` alone: --quick: small sizes, for development;
--seconds: how long the highest rate is offered.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

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
    framing,
    guards,
    health,
    history,
    latency,
    maintenance,
    peers,
    poisoned,
    pruning,
    reconciliation,
    replay,
    scale,
    shard_reads,
    shards,
    starts,
    writers,
)
from benchmarks.servers import servers
from benchmarks.table import Row, render
from outbox_pipelines.settings import Settings

_PARTS: dict[str, Callable[[Settings], list[Row]]] = {
    part.__name__.rpartition(".")[2]: part.measure
    for part in (
        drains,
        existing,
        framing,
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
        replay,
        pruning,
        adoption,
        cleaning,
        fleet,
        scale,
    )
}


def main(arguments: list[str]) -> int:
    """Measure and print the table. Return 2 for an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", add_help=False)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    is_busy, names = given.busy, given.names
    parts = _PARTS | {"scale": partial(scale.measure, quick=given.quick, seconds=given.seconds)}
    if unknown := set(names) - set(parts):
        print(f"unknown benchmark {min(unknown)!r}: choose from {', '.join(parts)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with servers() as settings, _burning() if is_busy else nullcontext():
        for name in names or parts:
            print(f"measuring {name} …", file=sys.stderr)
            rows += parts[name](settings)
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
