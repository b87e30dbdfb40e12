"""What can be measured of a consumer at work, beside its counts.

Invariants:
- Written by the consumer's thread or task, read by any other: plain values, replaced and never taken back.
- Costs an event a look at the clock; prometheus-client is not needed.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.consumer.reading import Place

BOUNDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""Seconds."""


class Histogram:
    """How long the calls of one handler took."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count a call."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


@dataclass(slots=True)
class Figures:
    """Of one run."""

    is_running: bool = True
    progress_at: float = field(default_factory=time.monotonic)
    """When the consumer last asked for messages, or was done with one. It does not change while a handler
    hangs, and while the database is waited for."""
    calls: dict[str, Histogram] = field(default_factory=dict)
    """By the name of the handler."""
    breakers: dict[str, bool] = field(default_factory=dict)
    """Whether a handler is left alone."""
    lag: Mapping[Place, int] = field(default_factory=dict)
    """Messages of each partition that are not handed out yet; of those where the client knows."""
    unseen: Collection[str] = ()
    """Types with a handler, of which no event has come."""
    backlog: Backlog | None = None
    """Of the inbox, when it was last looked at."""

    def progress(self) -> None:
        """Something is done."""
        self.progress_at = time.monotonic()

    def called(self, handler: str, seconds: float) -> None:
        """A handler was called, and has ended or failed."""
        self.calls.setdefault(handler, Histogram()).observe(seconds)
