"""What can be measured of a consumer: counts by result, types of events, durations.

Invariants:
- Written by the consumer's thread or task, read by any other: plain values, replaced and never taken back.
- Costs an event a look at the clock; prometheus-client is not needed.
- A misspelled type is reported: otherwise its events are passed over, and their offsets committed.
"""

from __future__ import annotations

import bisect
import difflib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from outbox_pipelines.consumer.inbox import Backlog
from outbox_pipelines.consumer.kafka_messages import Partition

_LOG: Final = logging.getLogger(__name__)
# Warnings come with this many events that were passed over, ten times as many, and so on.
_FIRST_WARNING: Final = 100
_MOST_TYPES: Final = 1_000
_ALIKE: Final = 0.85
_SHOWN: Final = 5
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


@dataclass(slots=True)
class Counts:
    """Counts of the messages of a run, by result."""

    handled: int = 0
    duplicates: int = 0
    """Already handled or received by this source."""
    ignored: int = 0
    """Of types without a handler, or whose handler takes only replays."""
    skipped_replays: int = 0
    """Events that a replay has published again, and no handler takes."""
    received: int = 0
    """Written to the inbox: failed, behind a failed event, or by `receive`."""
    failures: int = 0
    """Failed attempts."""
    dead_letters: int = 0
    outages: int = 0
    """How often a handler was paused because a service it needs was unavailable."""
    ignored_types: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """The ignored types, with their counts."""


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
    lag: Mapping[Partition, int] = field(default_factory=dict)
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


class Types:
    """What has come to one consumer.

    Args:
        wanted: types with a handler of their own.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        self.passed_over: Counter[str] = Counter()
        """How many of each type have no handler; of the first 1,000 types."""
        self.unseen = set(wanted)
        """Types with a handler, of which no event has come."""
        self._total = 0
        self._warn_at = _FIRST_WARNING

    def handled(self, event_type: str) -> None:
        """An event with a handler has come."""
        if self.unseen:
            self.unseen.discard(event_type)

    def pass_over(self, event_type: str) -> None:
        """An event without a handler has come."""
        self._total += 1
        is_first = event_type not in self.passed_over
        if not is_first or len(self.passed_over) < _MOST_TYPES:
            self.passed_over[event_type] += 1
        if is_first and (alike := difflib.get_close_matches(event_type, self.unseen, 1, _ALIKE)):
            _LOG.warning(
                "events of type %r are skipped; the handler of %r has received no event yet: check the name",
                event_type,
                alike[0],
            )
        if self._total >= self._warn_at:
            self._warn_at *= 10
            self.warn()

    def warn(self) -> None:
        """Logs a warning where handlers have had no event while others were passed over."""
        if self.unseen and self._total:
            common = self.passed_over.most_common(_SHOWN)
            _LOG.warning(
                "no event of type %s was received, while %d events were skipped: %s. "
                "Check the names of the types",
                ", ".join(sorted(map(repr, self.unseen))),
                self._total,
                ", ".join(f"{name!r} {count}" for name, count in common),
            )
