"""The parked events of a shard in the database: implements the core's `Table`.

Invariants:
- Everything runs in the session that owns the shard: a relay that has lost it can change nothing.
- Each call is one transaction. Content is read after an event is marked, never with it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final

from outbox_pipelines.config import rules
from outbox_pipelines.core.event import Event
from outbox_pipelines.relay.core.parked import (
    CRASHED,
    DEATH_PAUSE,
    LONGEST_PAUSE,
    ParkedEvent,
    TakenOver,
    Tried,
    Verdict,
)
from outbox_pipelines.relay.core.retries import MAX_CRASHES
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.memory import LargeEvent
from outbox_pipelines.relay.parking import parking_sql
from outbox_pipelines.settings import RelaySettings

# The columns of `Event` come first in every row.
_EVENT: Final = len(Event._fields)


class ParkedTable:
    """Implements `core.parked.Table`.

    Args:
        large: the right to keep a large event in memory, shared with the reader.
    """

    def __init__(self, settings: RelaySettings, shard: Shard, large: threading.Lock) -> None:
        self._shard = shard
        self._retry_seconds = settings.retry_seconds
        self._large = LargeEvent(large)
        by_event_type, by_aggregate_type = rules.own(settings, "on_dead_letter")
        self._blocking = {
            "blocks": settings.on_dead_letter == "block",
            "event_blocks": _blocks(by_event_type),
            "aggregate_blocks": _blocks(by_aggregate_type),
        }

    def take_over(self, *, crashed: bool) -> list[TakenOver]:
        """Update the events that were being tried when the previous relay ended; return them."""
        pauses = {"pause": DEATH_PAUSE * self._retry_seconds, "longest": LONGEST_PAUSE}
        with self._shard.transaction():
            rows = self._shard.execute(
                parking_sql.WAS_TRYING, {"crashed": crashed, "most": MAX_CRASHES, "error": CRASHED} | pauses
            )
            found = [TakenOver(Event._make(row[:_EVENT]), *row[_EVENT:]) for row in rows]
            runs = {_aggregate(one.event) for one in found if one.was == "waiting" and not one.is_alone}
            if crashed and runs:
                self._shard.execute(parking_sql.ALONE, _names(runs) | {"error": CRASHED})
        return found

    def news(self) -> int:
        """Return a number that changes with each replay or discard."""
        ((news,),) = self._shard.execute(parking_sql.NEWS, {})
        return int(news)

    def blocked(self) -> Iterable[tuple[str, str]]:
        """Return all aggregates that have parked events."""
        return [(kind, name) for kind, name in self._shard.execute(parking_sql.BLOCKED, self._blocking)]

    def heads(self, aggregates: Sequence[tuple[str, str]]) -> list[ParkedEvent]:
        """Return the first event of each aggregate that blocks it; none for a free aggregate."""
        return self._parked(parking_sql.HEADS, _names(aggregates) | self._blocking)

    def behind(self, aggregates: Sequence[tuple[str, str]], limit: int) -> list[ParkedEvent]:
        """Return for each the events that may be released: up to the next that must be tried alone."""
        rows = self._shard.execute(parking_sql.FREE, _names(aggregates) | self._blocking | {"limit": limit})
        return [ParkedEvent(_contentless(row), "waiting") for row in rows]

    def replays(self, limit: int) -> list[ParkedEvent]:
        """Return dead letters to be tried again: of each aggregate the first that is due."""
        return self._parked(parking_sql.REPLAYS, {"limit": limit})

    def has_replays(self) -> bool:
        """Return whether there are dead letters to be tried again, due or not."""
        ((some,),) = self._shard.execute(parking_sql.ANY_REPLAYS, {})
        return bool(some)

    def mark(self, seqs: Sequence[int]) -> None:
        """Mark these as being tried: a crash from now on counts against them."""
        self._shard.execute(parking_sql.TRYING, {"seqs": list(seqs)})

    def clear(self, seqs: Sequence[int]) -> None:
        """Clear the mark: a crash from now on does not count against them."""
        self._shard.execute(parking_sql.INNOCENT, {"seqs": list(seqs)})

    def read(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, Event | str]]:
        """Yield the content of these, one after the other, or why it cannot be read."""
        for seq, content in self._shard.read_parked(seqs, may_take_large):
            yield seq, content if isinstance(content, str) else Event._make(content)

    def take_large(self) -> bool:
        """Return whether this thread may keep a large event in memory now: one thread at a time may."""
        return self._large.take()

    def let_go(self) -> None:
        """Release that right: the large event is finished, or there was none."""
        self._large.give_back()

    def give_up(self, unreadable: dict[int, str]) -> list[tuple[int, int]]:
        """Make dead letters of these; return those that became one, with their attempts."""
        given = {"seqs": list(unreadable), "errors": list(unreadable.values())}
        return [(seq, attempts) for seq, attempts in self._shard.execute(parking_sql.UNREADABLE, given)]

    def accept(self, seqs: Sequence[int]) -> None:
        """Let these be released like the events behind them."""
        self._shard.execute(parking_sql.ACCEPTED, {"seqs": list(seqs)})

    def published(self, seqs: Sequence[int], suspects: dict[int, str]) -> None:
        """Record these as published, and the suspects of their batch to be tried alone."""
        with self._shard.transaction():
            self._shard.execute(parking_sql.RELEASED, {"seqs": list(seqs)})
            if suspects:
                given = {"seqs": list(suspects), "errors": list(suspects.values())}
                self._shard.execute(parking_sql.SUSPECTED, given)
        self._shard.count(len(seqs))

    def record(self, tried: Sequence[Tried], pauses: Sequence[float]) -> list[tuple[int, str, int]]:
        """Write verdicts; return seq, state and attempts of those that were refused."""
        by_verdict: dict[Verdict, list[tuple[Tried, float]]] = {verdict: [] for verdict in Verdict}
        for one, pause in zip(tried, pauses, strict=True):
            by_verdict[one.verdict].append((one, pause))
        published = [one.attempt.event.seq for one, _ in by_verdict[Verdict.PUBLISHED]]
        accepted = [one.attempt.event.seq for one, _ in by_verdict[Verdict.ACCEPTED]]
        postponed = by_verdict[Verdict.UNAVAILABLE] + by_verdict[Verdict.UNKNOWN]
        with self._shard.transaction():
            self._shard.execute(parking_sql.RELEASED, {"seqs": published})
            self._shard.execute(parking_sql.ACCEPTED, {"seqs": accepted})
            refused = by_verdict[Verdict.REFUSED]
            last = [one.attempt.is_last for one, _ in refused]
            rows = self._shard.execute(parking_sql.REFUSED, _columns(refused) | {"last": last})
            self._shard.execute(parking_sql.POSTPONED, _columns(postponed))
        self._shard.count(len(published))
        return [(seq, state, attempts) for seq, state, attempts in rows]

    def unpublished(self) -> tuple[int, int, float]:
        """Return how many events of the shard are parked or open dead letters.

        Also how many of them wait because a relay crashed while publishing them, and the seconds until the
        first of these is due.
        """
        ((unpublished, paused, due_in),) = self._shard.execute(parking_sql.UNPUBLISHED, {})
        return int(unpublished), int(paused), float(due_in)

    def _parked(self, query: Any, parameters: dict[str, Any]) -> list[ParkedEvent]:
        rows = self._shard.execute(query, parameters)
        return [ParkedEvent(_contentless(row), *row[_EVENT:]) for row in rows]


def _blocks(after: dict[str, str]) -> str:
    """Return which types block after a dead letter, as JSON."""
    return json.dumps({name: each == "block" for name, each in after.items()})


def _contentless(row: tuple[Any, ...]) -> Event:
    """Return an event without its content."""
    return Event._make(row[:_EVENT])._replace(payload="")


def _aggregate(event: Event) -> tuple[str, str]:
    return event.aggregate_type, event.aggregate_id


def _names(aggregates: Iterable[tuple[str, str]]) -> dict[str, Any]:
    types, ids = zip(*aggregates, strict=True)
    return {"types": list(types), "ids": list(ids)}


def _columns(tried: Sequence[tuple[Tried, float]]) -> dict[str, Any]:
    return {
        "seqs": [one.attempt.event.seq for one, _ in tried],
        "errors": [None if one.verdict is Verdict.UNKNOWN else one.reason for one, _ in tried],
        "pauses": [pause for _, pause in tried],
    }
