"""The sizes that are compared, each ten times the one before."""

from __future__ import annotations

from typing import Final, NamedTuple


class Sizes(NamedTuple):
    """What grows."""

    backlog: tuple[int, ...]
    """Events that wait."""
    days: tuple[int, ...]
    """Days before today that are attached."""
    blocked: tuple[int, ...]
    """Aggregates with a parked event."""
    late: tuple[int, ...]
    """Events that are written while one transaction stays open."""
    rates: tuple[int, ...]
    """Events offered a second."""
    others: int
    """Events of a drain in which something else grows."""
    listening: float
    """Seconds in which the latency is measured."""
    seconds: float
    """How long the highest rate is offered."""


FULL: Final = Sizes(
    backlog=(100_000, 1_000_000, 10_000_000),
    days=(4, 40, 400),
    blocked=(10, 100, 1_000),
    # The last: an hour at 1,000 events a second.
    late=(36_000, 360_000, 3_600_000),
    rates=(500, 5_000, 50_000),
    others=400_000,
    listening=10.0,
    seconds=60.0,
)
SMALL: Final = Sizes(
    backlog=(10_000, 100_000),
    days=(4, 40),
    blocked=(10, 100),
    late=(3_600, 36_000),
    rates=(500, 5_000),
    others=20_000,
    listening=2.0,
    seconds=5.0,
)
