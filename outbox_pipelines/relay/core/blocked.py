"""Which aggregates wait because an event of theirs could not be published. In memory; the table is the truth.

Invariants:
- An aggregate is blocked from its first parked event until none of its events is parked, in the table or on
  the way there; meanwhile every event of it that comes up is parked behind.
- Two threads: the publishing one asks and parks, the settling one retries and frees. Each call is atomic: see
  `relay.shared`. That an aggregate is not blocked may be asked beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from outbox_pipelines.event import Event
from outbox_pipelines.relay.core.ports import Clock

MOMENT_SECONDS: Final = 0.02
"""A pause of what could go on now, but for something else that is under way."""
_WHEN_IN_THE_TABLE = math.inf
LONGEST_PAUSE: Final = 300.0
"""Between two attempts at a parked event, in seconds."""
DEATH_PAUSE: Final = 3.0
"""The pause after a relay died while it tried an event alone, as a multiple of OUTBOX_RETRY_SECONDS; four
times as long after the second death. Kills from outside, every few seconds, rarely meet the event again."""
CRASHED: Final = "the relay died while this event was being published"


class Aggregate(NamedTuple):
    """What an order holds for."""

    aggregate_type: str
    aggregate_id: str


@dataclass(slots=True)
class _Blocked:
    in_flight: int = 0
    """Events parked by the publishing thread that are not in the table yet."""
    due: float | None = _WHEN_IN_THE_TABLE
    """When to look after it, by the clock; None: when somebody has done something for it."""
    busy: bool = False
    """Something of it is being tried."""


class BlockedAggregates:
    """The blocked aggregates of a shard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = math.inf
        # A plain tuple of the event's own strings finds an `Aggregate`: the hot loop makes no object more.
        self.aggregates: dict[tuple[str, str], _Blocked] = {}

    def park(self, event: Event, *, suspect: bool = False) -> bool:
        """Holds an event back; False if its aggregate has become free meanwhile and it may go.

        Args:
            suspect: block its aggregate if it is free.
        """
        aggregate = Aggregate(event.aggregate_type, event.aggregate_id)
        entry = self.aggregates.get(aggregate)
        if entry is None:
            if not suspect:
                return False
            entry = self.aggregates[aggregate] = _Blocked()
        entry.in_flight += 1
        return True

    def parked(self, events: Iterable[Event]) -> None:
        """These are in the table now."""
        for aggregate, count in Counter((e.aggregate_type, e.aggregate_id) for e in events).items():
            entry = self.aggregates[aggregate]
            entry.in_flight -= count
            if entry.due == _WHEN_IN_THE_TABLE:
                entry.due = self._next = 0.0

    def load(self, aggregates: Iterable[tuple[str, str]]) -> None:
        """The table has parked events of these: look after each."""
        for aggregate in aggregates:
            self.aggregates.setdefault(Aggregate(*aggregate), _Blocked()).due = 0.0
        for entry in self.aggregates.values():
            entry.due = self._next = 0.0

    @property
    def next_due(self) -> float:
        """When one may want looking after, by the clock."""
        return self._next

    def due(self, limit: int) -> list[Aggregate]:
        """Some that want looking after; each is busy until `look_again` or `free`."""
        now = self._clock()
        found: list[Aggregate] = []
        if now < self._next:
            return found
        self._next = math.inf
        for aggregate, entry in self.aggregates.items():
            if entry.busy or entry.due is None:
                continue
            if entry.due <= now and len(found) < limit:
                entry.busy = True
                found.append(Aggregate(*aggregate))
            else:
                self._next = min(self._next, entry.due)
        return found

    def look_again(self, aggregate: tuple[str, str], seconds: float | None = 0.0) -> None:
        """Not busy any more; look after it in so many seconds, None: not until it is loaded again."""
        entry = self.aggregates[aggregate]
        entry.busy = False
        entry.due = None if seconds is None else self._clock() + seconds
        self._next = min(self._next, entry.due or math.inf)

    def wake(self, aggregate: tuple[str, str]) -> None:
        """Something has been done for it, if it is blocked."""
        entry = self.aggregates.get(aggregate)
        if entry is not None and entry.due is None:
            entry.due = self._next = 0.0

    def free(self, aggregate: tuple[str, str]) -> None:
        """The table has nothing more of it: it may go, unless something is on the way there."""
        entry = self.aggregates[aggregate]
        if entry.in_flight:
            entry.busy, entry.due = False, _WHEN_IN_THE_TABLE
        else:
            del self.aggregates[aggregate]

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being tried, and nothing wants to be now or in a moment."""
        soon = self._clock() + MOMENT_SECONDS
        return not any(
            entry.busy or entry.in_flight or (entry.due is not None and entry.due <= soon)
            for entry in self.aggregates.values()
        )
