"""One drain by the real relay, in a process of its own, as `outbox relay --until-empty` does it.

As a program: ``python -m benchmarks.relay [SHARD]`` with the settings in the environment prints a `Drain`.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from benchmarks import usage
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings


class Drain(NamedTuple):
    """What one drain took."""

    events: float
    seconds: float
    """From the taken shard to the moved position."""
    peak: float
    """Resident memory of the process, in MB."""
    cpu: float
    """Seconds of CPU of the process, its start included."""
    ended: float
    """When, in seconds since 1970."""

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.seconds


if __name__ == "__main__":
    shard = int(sys.argv[1]) if len(sys.argv) > 1 else None
    totals = service.relay(load_settings(), shard=shard, until_empty=True)
    print(*Drain(totals.events, totals.seconds, usage.peak(), usage.cpu(), time.time()))
