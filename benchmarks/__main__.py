"""`python -m benchmarks [--busy] [NAME …]`: measures all parts or some, and keeps their results.

--busy: beside a process that burns a core. With ``QUICK=1`` in the environment: small sizes, ratios only,
nothing is kept. Parts in `_NAMED`, of a quick run also those in `_LONG`, are left out unless they are named.
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
    erasure,
    existing,
    fleet,
    framing,
    guards,
    health,
    history,
    latency,
    long_transaction,
    maintenance,
    peers,
    poisoned,
    pruning,
    reconciliation,
    redaction,
    replay,
    results,
    scale,
    shard_reads,
    shards,
    starts,
    storage,
    ticks,
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
        ticks,
        cdc,
        commits,
        writers,
        guards,
        storage,
        consumers,
        starts,
        archive,
        redaction,
        archive_queries,
        erasure,
        maintenance,
        health,
        history,
        reconciliation,
        replay,
        pruning,
        fleet,
        long_transaction,
        scale,
    )
}
# Takes as long as all others together.
_NAMED: Final = {"long_transaction"}
# Made of many millions of rows, or of waiting, which no smaller size shortens; and what no page compares.
_LONG: Final = {
    *("scale", "health", "history", "archive_queries", "maintenance", "existing", "shards", "fleet"),
    *("shard_reads", "replay", "ticks"),
}


def main(arguments: list[str]) -> int:
    """Measure, print the table, keep each part when it is done. Return 2 for an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", add_help=False)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(PARTS):
        print(f"unknown benchmark {min(unknown)!r}: choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    left_out = _NAMED | _LONG if QUICK else _NAMED
    names = given.names or [name for name in PARTS if name not in left_out]
    rows: list[Row] = []
    began = time.monotonic()
    with servers() as settings, _burning() if given.busy else nullcontext():
        for name in names:
            loop_ms, started = results.loop(), time.monotonic()
            found = PARTS[name](settings)
            print(f"measured {name} in {time.monotonic() - started:,.0f} s", file=sys.stderr)
            rows += found
            if not QUICK:
                results.store(name, results.run(found, loop_ms, settings, is_busy=given.busy))
    print(f"\n{render(rows, is_quick=QUICK)}\n\n{len(names)} parts in {time.monotonic() - began:,.0f} s")
    if not given.names:
        print(f"left out (name them in BENCH): {', '.join(sorted(left_out))}")
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
