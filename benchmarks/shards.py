"""What more shards bring on one machine: the same drain by 1, 2 and 4 relays side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from typing import Final

from benchmarks import programs
from benchmarks.quick import sized
from benchmarks.servers import fill, fresh_outbox, rewind
from benchmarks.table import Ratio, Row, rate
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.settings import Settings

_EVENTS: Final = sized(400_000, 40_000)
_COUNTS: Final = (1, 2, 4)
_ROUNDS: Final = sized(3, 1)


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    rates: dict[int, list[float]] = {count: [] for count in _COUNTS}
    with fresh_outbox(servers) as settings:
        fill(settings, _EVENTS)
        before = 1
        for count in _COUNTS * _ROUNDS:
            _change(settings, before, count)
            before = count
            rewind(settings)
            rates[count].append(_together(settings, count))
    one = median(rates[1])
    return [
        Row(
            f"drain of {_EVENTS:,} by {count} shard{'s' * (count > 1)}",
            (rate(found),),
            (Ratio(median(found) / one, "one"),),
        )
        for count, found in rates.items()
    ]


def _change(settings: Settings, before: int, count: int) -> None:
    """Between relays at work, as it must be."""
    with ExitStack() as relays:
        for _ in range(before):
            relays.enter_context(programs.running(settings, "outbox_pipelines", "relay"))
        resharding.change(settings, count)


def _together(settings: Settings, count: int) -> float:
    with ThreadPoolExecutor(count) as pool:
        drains = list(pool.map(lambda shard: programs.drain(settings, shard), range(count)))
    assert sum(drain.events for drain in drains) == _EVENTS, drains
    seconds = max(d.ended for d in drains) - min(d.ended - d.seconds for d in drains)
    return _EVENTS / seconds
