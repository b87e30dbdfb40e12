"""`outbox relay --trace-latency`: where the time goes between an event's row and its acknowledgment.

Invariants:
- Counts per batch, but for the time of each event's row, which its id contains (UUID version 7): no query and
  no message changes.
- The relay's clock is compared with that of whoever made the id, to a millisecond at best; all other times
  are the relay's own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from outbox_pipelines.event import Event
from outbox_pipelines.relay.core.batch import Batch
from outbox_pipelines.relay.core.breaker import State
from outbox_pipelines.relay.core.delivery import Complete
from outbox_pipelines.relay.shard import Settled
from outbox_pipelines.relay.telemetry.metrics import Metrics

_EVERY_SECONDS: Final = 10.0
# Of an interval: more would only cost memory.
_MOST_EVENTS: Final = 200_000
_STAGES: Final = (
    ("written -> seen", "the rest of the transaction, its commit, the wait for a read"),
    ("seen -> read", "the read itself"),
    ("read -> sent", "the wait until Kafka's client takes it"),
    ("sent -> acknowledged", "Kafka"),
    ("acknowledged -> settled", "the wait for the position, and its commit; delays no consumer"),
    ("written -> acknowledged", "all but the last"),
)


class LatencyTrace(Metrics):
    """Measures the stages of each event, and prints them every ten seconds while events come.

    Args:
        inner: is called as well.
        say: called with each line.
    """

    def __init__(self, inner: Metrics, say: Callable[[str], None]) -> None:
        self._inner = inner
        self._say = say
        self._read: dict[int, tuple[float, float]] = {}
        """By the seq of a batch's first event: when its read began and ended."""
        self._unsettled: deque[tuple[int, float]] = deque()
        """Events of a batch, and when they were acknowledged."""
        self._begin()

    def _begin(self) -> None:
        self._began_at = time.monotonic()
        self._events = 0
        self._without_time = 0
        self._seconds: list[list[float]] = [[] for _ in _STAGES]

    def read(self, batch: Batch, began_at: float) -> None:
        self._inner.read(batch, began_at)
        if batch.events:
            self._read[batch.events[0].seq] = began_at, time.time()

    def acknowledged(self, complete: Iterable[Complete]) -> None:
        complete = list(complete)
        self._inner.acknowledged(complete)
        now, monotonic = time.time(), time.monotonic()
        for one in complete:
            if not isinstance(one.batch, Batch) or not one.batch.events:
                continue
            sent_at = now - (monotonic - one.begun_at)
            began_at = read_at = math.nan
            for event in one.batch.events:
                # Of two ticks that were joined, the second has its own.
                if event.seq in self._read:
                    began_at, read_at = self._read.pop(event.seq)
                self._add(event, began_at, read_at, sent_at, now)
            self._unsettled.append((len(one.batch.events) - len(one.parked), now))

    def _add(self, event: Event, began_at: float, read_at: float, sent_at: float, now: float) -> None:
        self._events += 1
        written_at = written(event)
        if written_at is None:
            self._without_time += 1
        elif len(self._seconds[0]) < _MOST_EVENTS and not math.isnan(read_at):
            stages = began_at - written_at, read_at - began_at, sent_at - read_at, now - sent_at
            for found, seconds in zip(self._seconds, stages, strict=False):
                found.append(seconds)
            self._seconds[-1].append(now - written_at)

    def settled(self, events: int, seconds: float, progress: Settled | None) -> None:
        self._inner.settled(events, seconds, progress)
        now = time.time()
        while self._unsettled and events >= self._unsettled[0][0]:
            count, at = self._unsettled.popleft()
            events -= count
            if len(self._seconds[4]) < _MOST_EVENTS:
                self._seconds[4] += [now - at] * count
        if time.monotonic() - self._began_at >= _EVERY_SECONDS:
            self.report()

    def report(self) -> None:
        """Print what was measured since the last report, if anything was."""
        if self._events:
            over = time.monotonic() - self._began_at
            self._say(f"latency of {self._events:,} events in {over:.0f} s, in ms:")
            for line in self.lines():
                self._say(line)
        self._begin()

    def lines(self) -> list[str]:
        """Return a line for each stage."""
        shown = [f"  {'':24}{'p50':>9}{'p99':>9}{'max':>9}"]
        for (name, what), seconds in zip(_STAGES, self._seconds, strict=True):
            if seconds:
                p50, p99, largest = (f"{1000 * each:9.1f}" for each in _percentiles(seconds))
                shown.append(f"  {name:24}{p50}{p99}{largest}  {what}")
        if self._without_time:
            shown.append(f"  {self._without_time:,} events have an id without a time (UUID version 7)")
        return shown

    # --- passed on --------------------------------------------------------------------------------------

    def took(self, shard: int) -> None:
        self._inner.took(shard)

    def released(self) -> None:
        self.report()
        self._read.clear()
        self._unsettled.clear()
        self._inner.released()

    def published(self, events: int) -> None:
        self._inner.published(events)

    def rejected(self, reasons: Iterable[str]) -> None:
        self._inner.rejected(reasons)

    def dead_lettered(self) -> None:
        self._inner.dead_lettered()

    def breaker(self, state: State) -> None:
        self._inner.breaker(state)


def written(event: Event) -> float | None:
    """Return when an event's id was made, in seconds since 1970; None if it contains no time."""
    digits = event.id.replace("-", "")
    if digits[12:13] != "7":
        return None
    # PostgreSQL and the writer put the part of the millisecond into the 12 bits that follow.
    return (int(digits[:12], 16) + int(digits[13:16], 16) / 4096) / 1000


def _percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return ordered[last // 2], ordered[math.ceil(last * 0.99)], ordered[last]
