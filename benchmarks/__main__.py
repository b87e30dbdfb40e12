"""`python -m benchmarks [--busy] [NAME …]`: measures all parts or some, and keeps their results.

--busy: beside a process that burns a core. With ``QUICK=1`` in the environment: small sizes, ratios only,
nothing is kept, and the parts in `_LONG` are left out unless they are named.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

from benchmarks import (
    archive,
    archive_queries,
    cdc,
    commits,
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
    results,
    scale,
    shard_reads,
    shards,
    starts,
    writers,
)
from benchmarks.quick import QUICK
from benchmarks.servers import servers
from benchmarks.table import Row, render
from outbox_pipelines.settings import Settings

PARTS: Final[dict[str, Callable[[Settings], list[Row]]]] = {
    part.__name__.rpartition(".")[2]: part.measure
    for part in (
        drains,
        existing,
        framing,
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
        health,
        history,
        reconciliation,
        replay,
        pruning,
        fleet,
        scale,
    )
}
# Made of many millions of rows, or of waiting, which no smaller size shortens.
_LONG: Final = {"scale", "health", "history", "archive_queries", "maintenance", "existing", "shards", "fleet"}


def main(arguments: list[str]) -> int:
    """Measure, print the table, keep each part when it is done. Return 2 for an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", add_help=False)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(PARTS):
        print(f"unknown benchmark {min(unknown)!r}: choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    names = given.names or [name for name in PARTS if not (QUICK and name in _LONG)]
    rows: list[Row] = []
    began = time.monotonic()
    with servers() as settings, _burning() if given.busy else nullcontext():
        for name in names:
            print(f"measuring {name} …", file=sys.stderr)
            loop_ms = results.loop()
            found = PARTS[name](settings)
            rows += found
            if not QUICK:
                results.store(name, results.run(found, loop_ms, settings, is_busy=given.busy))
    print(f"\n{render(rows, is_quick=QUICK)}\n\n{len(names)} parts in {time.monotonic() - began:,.0f} s")
    if QUICK and not given.names:
        print(f"left out (name them in BENCH): {', '.join(sorted(_LONG))}")
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
