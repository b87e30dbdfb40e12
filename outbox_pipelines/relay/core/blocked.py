"""The blocked aggregates: those that have parked events. In memory; the table is authoritative.

Invariants:
- An aggregate is blocked from its first parked event until none of its events is parked, in the table or
  about to be written to it. Until then each further event of it is parked behind.
- Two threads: the publishing thread checks and parks, the settling thread retries and frees. Each call is
  atomic: see `relay.shared`. Only whether an aggregate is blocked may be read without a lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.producers import Clock

MOMENT_SECONDS: Final = 0.02
"""The pause of an aggregate that only waits for something else in progress."""
_WHEN_IN_THE_TABLE = math.inf


class Aggregate(NamedTuple):
    """Ordering key: type and id of an aggregate."""

    aggregate_type: str
    aggregate_id: str


@dataclass(slots=True)
class _Blocked:
    in_flight: int = 0
    """Events parked by the publishing thread that are not in the table yet."""
    due: float | None = _WHEN_IN_THE_TABLE
    """When to retry it, by the clock; None: after a replay or discard."""
    busy: bool = False
    """Whether one of its events is being tried."""


class BlockedAggregates:
    """The blocked aggregates of a shard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = math.inf
        # A plain tuple of the event's strings finds an `Aggregate`, so the hot loop creates no object.
        self.aggregates: dict[tuple[str, str], _Blocked] = {}

    def park(self, event: Event, *, suspect: bool = False) -> bool:
        """Park an event; return False if its aggregate has become free, and the event may be published.

        Args:
            suspect: block its aggregate if it is free.
        """
        entry = self.aggregates.get((event.aggregate_type, event.aggregate_id))
        if entry is None:
            if not suspect:
                return False
            entry = _Blocked()
            self.aggregates[Aggregate(event.aggregate_type, event.aggregate_id)] = entry
        entry.in_flight += 1
        return True

    def parked(self, events: Iterable[Event]) -> None:
        """Record that these events are in the table now."""
        for aggregate, count in Counter((e.aggregate_type, e.aggregate_id) for e in events).items():
            entry = self.aggregates[aggregate]
            entry.in_flight -= count
            if entry.due == _WHEN_IN_THE_TABLE:
                entry.due = self._next = 0.0

    def load(self, aggregates: Iterable[tuple[str, str]]) -> None:
        """Block these aggregates, which have parked events in the table, and schedule each."""
        for aggregate in aggregates:
            self.aggregates.setdefault(Aggregate(*aggregate), _Blocked()).due = 0.0
        for entry in self.aggregates.values():
            entry.due = self._next = 0.0

    @property
    def next_due(self) -> float:
        """When the next aggregate may be due, by the clock."""
        return self._next

    def due(self, limit: int) -> list[Aggregate]:
        """Return up to `limit` aggregates that are due; each is busy until `schedule` or `free`."""
        now = self._clock()
        due: list[Aggregate] = []
        if now < self._next:
            return due
        self._next = math.inf
        for aggregate, entry in self.aggregates.items():
            if entry.busy or entry.due is None:
                continue
            if entry.due <= now and len(due) < limit:
                entry.busy = True
                due.append(Aggregate(*aggregate))
            else:
                self._next = min(self._next, entry.due)
        return due

    def schedule(self, aggregate: tuple[str, str], seconds: float | None = 0.0) -> None:
        """End its busy state and schedule it in `seconds`; with None it waits for `wake` or `load`."""
        entry = self.aggregates[aggregate]
        entry.busy = False
        entry.due = None if seconds is None else self._clock() + seconds
        self._next = min(self._next, entry.due or math.inf)

    def wake(self, aggregate: tuple[str, str]) -> None:
        """Schedule an aggregate that waits for a replay, a discard or its topic, if it is blocked."""
        entry = self.aggregates.get(aggregate)
        if entry is not None and entry.due is None:
            entry.due = self._next = 0.0

    def free(self, aggregate: tuple[str, str]) -> None:
        """Free an aggregate that has no parked events in the table, unless some are about to be written."""
        entry = self.aggregates[aggregate]
        if entry.in_flight:
            entry.busy, entry.due = False, _WHEN_IN_THE_TABLE
        else:
            del self.aggregates[aggregate]

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being tried, and nothing is due now or in a moment."""
        soon = self._clock() + MOMENT_SECONDS
        return not any(
            entry.busy or entry.in_flight or (entry.due is not None and entry.due <= soon)
            for entry in self.aggregates.values()
        )
