"""How much a run has to do: the sizes of events, backlogs, and how much of them the relay reads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Load:
    """What is written, and in how large batches it is relayed."""

    sizes: str = "small"
    """A name in `business.SIZES`."""
    backlog: int = 0
    """Most events of one backlog; 0: there are none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of relays."""
    writers: bool = True
    long_keys: bool = False
    """Whether some accounts have keys of `business.LONG_KEY` characters."""
    pause_seconds: float = 0.04
    """Most seconds that a writer waits between two transactions."""


# Small batches, so that faults meet unfinished ticks, and transactions of many batches.
SMALL = Load(environment={"OUTBOX_BATCH_EVENTS": "5"})
# The same concurrency with fewer transactions, for runs that judge faults and not throughput.
GENTLE = replace(SMALL, pause_seconds=0.15)
# As users have them: ticks and transactions that take seconds.
LARGE = Load("mixed", 40_000)
USUAL = Load("usual", 60_000)
LOADS: Mapping[str, Load] = {"small": SMALL, "usual": USUAL, "large": LARGE}
