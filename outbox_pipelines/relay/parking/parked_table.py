"""The parked events of a shard in the database: implements the core's `ParkedRows`.

Invariants:
- Everything runs in the session that owns the shard: a relay that lost the shard cannot change anything.
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
    CRASH_PAUSE,
    CRASHED,
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
    """Implements `core.parked.ParkedRows`.

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
        pauses = {"pause": CRASH_PAUSE * self._retry_seconds, "longest": LONGEST_PAUSE}
        with self._shard.transaction():
            rows = self._shard.execute(
                parking_sql.WAS_TRYING, {"crashed": crashed, "most": MAX_CRASHES, "error": CRASHED} | pauses
            )
            tried = [TakenOver(Event._make(row[:_EVENT]), *row[_EVENT:]) for row in rows]
            runs = {
                _aggregate(taken.event) for taken in tried if taken.was == "waiting" and not taken.is_alone
            }
            if crashed and runs:
                self._shard.execute(parking_sql.ALONE, _names(runs) | {"error": CRASHED})
        return tried

    def revision(self) -> int:
        ((revision,),) = self._shard.execute(parking_sql.REVISION, {})
        return int(revision)

    def blocked(self) -> Iterable[tuple[str, str]]:
        return [(kind, name) for kind, name in self._shard.execute(parking_sql.BLOCKED, self._blocking)]

    def heads(self, aggregates: Sequence[tuple[str, str]]) -> list[ParkedEvent]:
        return self._parked(parking_sql.HEADS, _names(aggregates) | self._blocking)

    def behind(self, aggregates: Sequence[tuple[str, str]], limit: int) -> list[ParkedEvent]:
        rows = self._shard.execute(parking_sql.FREE, _names(aggregates) | self._blocking | {"limit": limit})
        return [ParkedEvent(_contentless(row), "waiting") for row in rows]

    def replays(self, limit: int) -> list[ParkedEvent]:
        return self._parked(parking_sql.REPLAYS, {"limit": limit})

    def has_replays(self) -> bool:
        ((some,),) = self._shard.execute(parking_sql.ANY_REPLAYS, {})
        return bool(some)

    def mark(self, seqs: Sequence[int]) -> None:
        self._shard.execute(parking_sql.TRYING, {"seqs": list(seqs)})

    def clear(self, seqs: Sequence[int]) -> None:
        self._shard.execute(parking_sql.INNOCENT, {"seqs": list(seqs)})

    def read(
        self, seqs: Sequence[int], may_take_large: Callable[[], bool]
    ) -> Generator[tuple[int, Event | str]]:
        for seq, content in self._shard.read_parked(seqs, may_take_large):
            yield seq, content if isinstance(content, str) else Event._make(content)

    def take_large(self) -> bool:
        return self._large.take()

    def return_large(self) -> None:
        self._large.give_back()

    def make_dead_letters(self, unreadable: dict[int, str]) -> list[tuple[int, int]]:
        parameters = {"seqs": list(unreadable), "errors": list(unreadable.values())}
        return [(seq, attempts) for seq, attempts in self._shard.execute(parking_sql.UNREADABLE, parameters)]

    def accept(self, seqs: Sequence[int]) -> None:
        self._shard.execute(parking_sql.ACCEPTED, {"seqs": list(seqs)})

    def published(self, seqs: Sequence[int], suspects: dict[int, str]) -> None:
        with self._shard.transaction():
            self._shard.execute(parking_sql.RELEASED, {"seqs": list(seqs)})
            if suspects:
                parameters = {"seqs": list(suspects), "errors": list(suspects.values())}
                self._shard.execute(parking_sql.SUSPECTED, parameters)
        self._shard.count(len(seqs))

    def record(self, results: Sequence[Tried], pauses: Sequence[float]) -> list[tuple[int, str, int]]:
        by_verdict: dict[Verdict, list[tuple[Tried, float]]] = {verdict: [] for verdict in Verdict}
        for tried, pause in zip(results, pauses, strict=True):
            by_verdict[tried.verdict].append((tried, pause))
        published = [tried.attempt.event.seq for tried, _ in by_verdict[Verdict.PUBLISHED]]
        accepted = [tried.attempt.event.seq for tried, _ in by_verdict[Verdict.ACCEPTED]]
        postponed = by_verdict[Verdict.UNAVAILABLE] + by_verdict[Verdict.UNKNOWN]
        with self._shard.transaction():
            self._shard.execute(parking_sql.RELEASED, {"seqs": published})
            self._shard.execute(parking_sql.ACCEPTED, {"seqs": accepted})
            refused = by_verdict[Verdict.REFUSED]
            last = [tried.attempt.is_last for tried, _ in refused]
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
    return json.dumps({name: effect == "block" for name, effect in after.items()})


def _contentless(row: tuple[Any, ...]) -> Event:
    """Return an event without its content."""
    return Event._make(row[:_EVENT])._replace(payload="")


def _aggregate(event: Event) -> tuple[str, str]:
    return event.aggregate_type, event.aggregate_id


def _names(aggregates: Iterable[tuple[str, str]]) -> dict[str, Any]:
    types, ids = zip(*aggregates, strict=True)
    return {"types": list(types), "ids": list(ids)}


def _columns(results: Sequence[tuple[Tried, float]]) -> dict[str, Any]:
    return {
        "seqs": [tried.attempt.event.seq for tried, _ in results],
        "errors": [None if tried.verdict is Verdict.UNKNOWN else tried.reason for tried, _ in results],
        "pauses": [pause for _, pause in results],
    }
