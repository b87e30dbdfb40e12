"""What each compression of Kafka's messages costs and saves: speed of the drain, CPU, bytes in the topic."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from benchmarks import programs
from benchmarks.relay import Drain
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Row
from outbox_pipelines.settings import Settings

_EVENTS = 100_000
_ROUNDS = 3
_KINDS = ("none", "gzip", "snappy", "lz4", "zstd")


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    drains: dict[str, list[Drain]] = {kind: [] for kind in _KINDS}
    sizes: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    with fresh_outbox(servers) as settings, tempfile.TemporaryDirectory() as folder:
        fill(settings, _EVENTS)
        before = _bytes(settings)
        # In turn, so that a drift of the machine falls on all alike.
        for _ in range(_ROUNDS):
            for kind in _KINDS:
                config = Path(folder) / f"{kind}.conf"
                config.write_text(f"compression.type={kind}\n")
                rewind(settings)
                drains[kind].append(programs.drain(settings.model_copy(update={"kafka_config": config})))
                after = _bytes(settings)
                sizes[kind].append(after - before)
                before = after
    return [
        Row(
            f"drain of {_EVENTS:,}, compression {kind}",
            f"{median(drain.rate for drain in drains[kind]):,.0f} events/s",
            f"{median(drain.cpu for drain in drains[kind]):.1f} s of CPU, "
            f"{median(sizes[kind]) / _EVENTS:.0f} B an event in the topic",
        )
        for kind in _KINDS
    ]


def _bytes(settings: Settings) -> int:
    """Of the topic's messages, in the files of the broker that `servers` has started."""
    topic = settings.topic.format(aggregate_type="order")
    files = Path(tempfile.gettempdir()).glob(f"outbox-bench-*/kafka/**/{topic}-*/*.log")
    return sum(file.stat().st_size for file in files)
